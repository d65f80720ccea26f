lm_eval --model hf --model_args pretrained=base,peft=adapters/sentiment --include_path . \
    --tasks tickets --apply_chat_template --log_samples --output_path answers
