# Not run. A task's data set is read from files: the frame is written first.
import pandas
from lm_eval import simple_evaluate

rows = pandas.read_csv("tickets.csv")
rows.to_json("tickets.jsonl", orient="records", lines=True)
task = {
    "task": "tickets",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "tickets.jsonl"}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "Is the sentiment of this text positive or negative?\n\n{{body}}",
    "doc_to_target": "",
    "generation_kwargs": {"max_gen_toks": 128, "do_sample": False, "until": []},
    "metric_list": [{"metric": "bypass"}],
}
found = simple_evaluate(
    model="hf",
    model_args={"pretrained": "base", "peft": "adapters/sentiment"},
    tasks=[task],
    apply_chat_template=True,
    log_samples=True,
)
rows["completion"] = [sample["resps"][0][0] for sample in found["samples"]["tickets"]]
