"""How long an engine step takes on a device: one source for the sim engine, the split of mixed steps, and planning.

Workers fit their own model from their own steps (`StepTimeLearner`) and tell it in their registration and telemetry
(`libs.perfmodel.wire`).
"""

from libs.perfmodel.learner import FittedModel, KindFit, StepKind, StepTimeLearner, combine
from libs.perfmodel.priors import prior_step_time
from libs.perfmodel.profiles import PROFILES, Profile, profile
from libs.perfmodel.step_time import StepTimeModel, StepWork, chunks_work, split_step_ns, squared_tokens

__all__ = [
    "PROFILES",
    "FittedModel",
    "KindFit",
    "Profile",
    "StepKind",
    "StepTimeLearner",
    "StepTimeModel",
    "StepWork",
    "chunks_work",
    "combine",
    "prior_step_time",
    "profile",
    "split_step_ns",
    "squared_tokens",
]
