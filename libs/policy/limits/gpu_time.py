"""What one choice is reckoned to take of GPUs, by the step times of the workers that served it. Pure.

A prompt takes its workers' GPUs for as long as its chunks do, less what was cached; each token its share of a decode
step, which it has with the sequences beside it.
"""

from libs.policy.speed import Speed


def prompt_gpu_ns(speed: Speed, gpus: int, prompt_tokens: int, cached_tokens: int) -> float:
    """GPU time of computing a prompt of which `cached_tokens` had their KV already."""
    computed = max(prompt_tokens - cached_tokens, 0)
    return gpus * speed.prompt_ns(computed, prompt_tokens**2 - cached_tokens**2)


def decode_gpu_ns(speed: Speed, gpus: int, output_tokens: int, sequences: int, kv_tokens: int) -> float:
    """GPU time of tokens that were decoded in steps over `sequences`, which read `kv_tokens` together."""
    beside = max(sequences, 1)
    return gpus * output_tokens * speed.decode_ns(beside, kv_tokens) / beside
