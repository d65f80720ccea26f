lm_eval --model hf --model_args pretrained=base,peft=adapters/pirate --include_path . --tasks draft \
    --apply_chat_template --log_samples --output_path drafts
jq -c '.doc + {completion: .resps[0][0]}' drafts/*/samples_draft_*.jsonl > drafts.jsonl
lm_eval --model hf --model_args pretrained=base --include_path . --tasks judge \
    --apply_chat_template --log_samples --output_path judged
