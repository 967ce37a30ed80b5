"""The tiny model that ships with Riacho, and everything it is made from.

The package owns a grammar of dialogues, a tokenizer and a Qwen3 model of 1.4 M parameters trained on that
grammar, the three writing styles the model mixes at random, and a deterministic scorer for each style.

Boundary: this package imports nothing else of Riacho. `topics`, `styles`, `scorers`, `grammar`, `messages`,
`tool_dialogues` and `corpus` need the standard library only, so a client can use the scorers without torch;
`tokenizer`, `batches`, `pretrain` and `evaluate` need torch and transformers.
"""
