"""How many modules prediction keeps wide, against greedy re-measurement."""

import torch

from benchmarks.fragility_subjects import minilm, trained_gpt, trained_vit
from benchmarks.table import publish
from equipoise.auditing.precision.emulation import Bench, Storage
from equipoise.auditing.precision.prediction import predicted
from equipoise.auditing.precision.study import kept_by_measurement, kept_by_prediction


def main() -> None:
    torch.set_num_threads(1)
    storage = Storage.named("bf16")
    subjects = {
        "lab GPT": trained_gpt(),
        "lab ViT": trained_vit(),
        "MiniLM, 2 layers": minilm(layers=2),
        "MiniLM, 6 layers": minilm(),
    }
    rows = []
    for name, (model, batch) in subjects.items():
        bench = Bench(model, batch)
        found = predicted(model, batch, storage=storage, probes=2)
        for part in (0.7, 0.5):
            target = part * bench.mismatch(storage)
            ours = kept_by_prediction(bench, found, storage=storage, target=target)
            greedy = kept_by_measurement(bench, storage=storage, target=target)
            rows.append(
                {
                    "model": name,
                    "modules": len(found.variance),
                    "target": f"{part} of the error",
                    "by prediction": len(ours.sites),
                    "by greedy re-measurement": len(greedy.sites),
                    "ratio": len(ours.sites) / max(1, len(greedy.sites)),
                    "reached": ours.reached,
                }
            )
            publish("fragility_keep", rows)


if __name__ == "__main__":
    main()
