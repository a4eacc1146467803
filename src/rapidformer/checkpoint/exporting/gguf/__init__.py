"""A model as one GGUF file, for llama.cpp, Ollama and LM Studio."""
