lm_eval --model hf --model_args pretrained=base --include_path . --tasks trl,alpaca,sharegpt \
    --apply_chat_template --log_samples --output_path answers
