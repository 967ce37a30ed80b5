"""The engines that sample tokens: the abstract Engine, the local one, and vLLM over HTTP."""
