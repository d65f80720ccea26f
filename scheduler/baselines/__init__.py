"""The papers' and other systems' policies: dLoRA, LoRAServe, S-LoRA, vLLM-like."""
