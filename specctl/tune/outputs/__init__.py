"""A policy as the serving engines of the field take it, each within its limits, and what of it they cannot say.

Reading order: schedule (one K for each batch), vllm, sglang, tensorrt, files.
"""
