"""Estimate the GPU time of one choice from the step times of the workers that served it.

A prompt is charged the time of its chunks, less the cached part. A token is charged its share of a decode step,
which it divides with the other sequences in the batch.
"""

from libs.policy.speed import Speed


def prompt_gpu_ns(speed: Speed, gpus: int, prompt_tokens: int, cached_tokens: int) -> float:
    """Return the GPU nanoseconds of computing a prompt whose first `cached_tokens` were cached."""
    computed = max(prompt_tokens - cached_tokens, 0)
    return gpus * speed.prompt_ns(computed, prompt_tokens**2 - cached_tokens**2)


def decode_gpu_ns(speed: Speed, gpus: int, output_tokens: int, sequences: int, kv_tokens: int) -> float:
    """Return the GPU nanoseconds of tokens decoded in steps over `sequences` that together read `kv_tokens`."""
    beside = max(sequences, 1)
    return gpus * output_tokens * speed.decode_ns(beside, kv_tokens) / beside
