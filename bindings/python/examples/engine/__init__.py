"""A small language-model engine in numpy: enough to let a real model decode from a kivi cache.

gguf_file   reads the model file: shape, weights, tokenizer tables
llama       the forward pass of the Llama and Qwen2 families
tokenizer   text to token ids and back
caches      where keys and values live: plain numpy arrays, or a kivi cache
decode      token by token: score given windows, or generate
"""
