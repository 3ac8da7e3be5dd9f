"""Test of a guide as it arrives in vLLM's EngineCore, and of the grammar made from it."""

import numpy as np
import pytest

from libs.engine.config import EngineConfig
from libs.engine.port import EnginePhase, EngineRequest, SamplingParams
from libs.engine.vllm.connectors import ConnectorSession, connector_of
from libs.testing.engines.real_model import real_model_folder

pytestmark = pytest.mark.vllm


def test_vllm_compiles_a_guide_that_none_of_its_servers_has_checked() -> None:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
    from vllm.v1.structured_output import StructuredOutputManager

    from libs.engine.vllm.guides import serve_guides
    from libs.engine.vllm.launch import configured
    from libs.engine.vllm.wire import core_request

    config = EngineConfig(real_model_folder(), "m", block_size_tokens=32, kv_memory_mb=64)
    connector = connector_of(config)
    manager = StructuredOutputManager(configured(config, connector))
    serve_guides(manager)
    sampling = SamplingParams(guide='start: "{" /[a-c]{3}/ "}"')
    tokens = np.array([1, 2, 3], np.int32)
    parsed = core_request(
        EngineRequest(1, "one", EnginePhase.BOTH, tokens, len(tokens), 8, sampling),
        "one",
        None,
        max_tokens=8,
        eos_token_ids=frozenset(),
        handing=ConnectorSession(connector, "engine"),
        adapters={},
    )
    arrived = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(parsed))
    request = Request.from_engine_core_request(arrived, None)
    manager.grammar_init(request)
    grammar = request.structured_output_request._grammar.result()
    assert grammar.accept_tokens("one", []) and not grammar.is_terminated()
