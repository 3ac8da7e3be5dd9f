"""NVIDIA Dynamo: its frontend over a prefill and a decode mocker, on CPU."""
