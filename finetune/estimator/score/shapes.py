from transformers import AutoConfig, MistralConfig, LlamaConfig
def config_of(shape, layers=None):
    d=dict(hidden_size=4096,intermediate_size=14336,num_hidden_layers=layers or 32,num_attention_heads=32,num_key_value_heads=8)
    return {"mistral": MistralConfig(vocab_size=32000,sliding_window=None,**d),"llama3":LlamaConfig(vocab_size=128256,**d)}[shape]
