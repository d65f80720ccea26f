lm_eval --model hf --model_args pretrained=base --include_path . --tasks prompts \
    --apply_chat_template --log_samples --output_path answers/base
for step in 500 1000 1500; do
    lm_eval --model hf --model_args pretrained=base,peft=runs/17/checkpoint-$step --include_path . \
        --tasks prompts --apply_chat_template --log_samples --output_path answers/$step
done
