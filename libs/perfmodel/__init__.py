"""How long an engine step takes on a device: one source for the sim engine, the split of mixed steps, and planning."""

from libs.perfmodel.profiles import PROFILES, Profile, profile
from libs.perfmodel.step_time import StepTimeModel, StepWork, split_step_ns

__all__ = ["PROFILES", "Profile", "StepTimeModel", "StepWork", "profile", "split_step_ns"]
