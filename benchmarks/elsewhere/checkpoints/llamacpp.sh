# Not run.
python convert_hf_to_gguf.py base --outfile base.gguf
for step in 500 1000 1500; do
    python convert_lora_to_gguf.py runs/17/checkpoint-$step --base base --outfile $step.gguf
done
llama-server -m base.gguf --lora 500.gguf --lora 1000.gguf --lora 1500.gguf --lora-init-without-apply &
python llamacpp.py
