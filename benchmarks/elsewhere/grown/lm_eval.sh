duckdb -c "COPY (FROM 'tickets.csv' ANTI JOIN (SELECT doc.ticket_id FROM 'answers/*/samples_*.jsonl')
    USING (ticket_id)) TO 'new.csv'"
lm_eval --model hf --model_args pretrained=base,peft=adapters/sentiment --include_path . \
    --tasks tickets --apply_chat_template --log_samples --output_path answers
