"""Places of a model's linear layers, as the suite's replay names them -> how vLLM's names of them end."""

LINEARS = {
    "qkv_a": ".fused_qkv_a_proj",
    "q_b": ".q_b_proj",
    "o_proj": ".o_proj",
    "dense gate_up": ".mlp.gate_up_proj",
    "dense down": ".mlp.down_proj",
    "shared gate_up": ".shared_experts.gate_up_proj",
    "shared down": ".shared_experts.down_proj",
}
