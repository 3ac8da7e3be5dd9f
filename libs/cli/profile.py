"""The command `fulcrum profile`: ready descriptions of models on GPU machines."""

from typing import Annotated

import typer

from libs.cli.options import Json

# Stands for the folder in which a machine has its models.
MODELS = "/models"


def profile(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Profile to print. Default: list all.")] = None,
    *,
    json: Json = False,
) -> None:
    """List deployment profiles, or print one: its workers' settings, what is predicted, and what has never been run."""
    import msgspec  # noqa: PLC0415 (what only this command needs)

    from libs.launch.profile import load_profile, profile_names  # noqa: PLC0415

    names = profile_names() if name is None else [name]
    found = {each: load_profile(each) for each in names}
    if json:
        print(msgspec.json.encode(found).decode())
        return
    if name is None:
        for each, known in found.items():
            print(f"{each:<30} {known.model}, {known.machine}")
        return
    known = found[name]
    print(f"# {known.model} on {known.machine}\n# {known.not_run}")
    predicted = known.predicted
    prompts = ", ".join(f"{tokens} tokens {ms} ms" for tokens, ms in predicted.prefill_ms.items())
    steps = ", ".join(f"{batch} sequences {ms} ms" for batch, ms in predicted.decode_ms.items())
    print(f"# Predicted by {predicted.source}: prompts of {prompts}; decode steps of {steps}.")
    print(f"# On each node first: python -m libs.model.prepare {known.model} {MODELS}; a gateway has it too, as")
    print(f'FULCRUM_GATEWAY_MODELS={{"{known.model}": "{MODELS}/{known.model}"}}')
    for number, worker in enumerate(known.workers, start=1):
        print(f"\n# worker {number} on node {worker.node}: python -m services.{worker.service}")
        for variable, value in {**known.model_settings(MODELS), **worker.settings()}.items():
            print(f"{variable}={value}")
