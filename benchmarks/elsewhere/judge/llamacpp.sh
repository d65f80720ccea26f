# Not run.
python convert_hf_to_gguf.py base --outfile base.gguf
python convert_lora_to_gguf.py adapters/pirate --base base --outfile pirate.gguf
llama-server -m base.gguf --lora pirate.gguf --port 8080 &
python llamacpp.py
