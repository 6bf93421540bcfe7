"""Writes the compatibility matrix in docs/switches.md from the guards of the switches; `make fmt` runs it."""

from pathlib import Path
from typing import Any

from stretto import switches
from stretto.checks import cross_field_problems
from stretto.config import Config

DOCUMENT = Path(__file__).parents[1] / "docs" / "switches.md"
BEGIN, END = "<!-- matrix: begin, made by scripts/switch_matrix.py -->\n", "<!-- matrix: end -->\n"

FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "another policy loss, aggregation or advantage": {
        "algorithm": {"policy_loss": "gspo", "aggregation": "sequence_mean", "advantage": "rloo"}
    },
    "`algorithm.truncated`": {"algorithm": {"truncated": "mask"}},
    "`staleness.max` 0": {"staleness": {"max": 0}},
    "`staleness.max` above 0, TIS or MIS": {"staleness": {"max": 2}, "algorithm": {"importance_correction": "mis"}},
    "`staleness.max` above 0, no correction": {"algorithm": {"importance_correction": "none"}},
    "`staleness.mode` bounded": {"staleness": {"mode": "bounded"}, "run": {"determinism": "fast"}},
    "`algorithm.old_policy` rollout": {"algorithm": {"old_policy": "rollout"}},
    "`algorithm.old_policy` old_actor": {"algorithm": {"old_policy": "old_actor"}},
    "`algorithm.kl_loss_coef`": {"algorithm": {"kl_loss_coef": 0.1}},
    "`algorithm.kl_reward_coef`": {"algorithm": {"kl_reward_coef": 0.1}},
    "`algorithm.teacher`": {"algorithm": {"teacher": "org/teacher"}},
    "`actor.before_logprob_hook`": {"actor": {"before_logprob_hook": "module:function"}},
    "`actor.minis_per_partition` above 1": {"actor": {"minis_per_partition": 2}},
    "`actor.chunks_per_mini` 1": {"actor": {"chunks_per_mini": 1}},
    "`actor.epochs` above 1": {"actor": {"epochs": 2}},
    "several microbatches": {"actor": {"max_tokens_per_microbatch": 256}},
    "`actor.data_parallel`": {"actor": {"data_parallel": 2}},
    "`actor.gradient_checkpointing`": {"actor": {"gradient_checkpointing": True}},
    "`actor.layout` padded or shared": {"actor": {"layout": "shared"}},
    "`actor.freeze`": {"actor": {"freeze": ("vision_tower",)}},
    "`lora.rank`, either `lora.publish`": {"lora": {"rank": 8, "publish": "adapter"}},
    "`lora.dropout` or attention dropout": {"lora": {"rank": 8, "dropout": 0.1}},
    "`rollout.replicas`": {"rollout": {"replicas": 2}},
    "`rollout.refill_rounds`": {"rollout": {"refill_rounds": 4}},
    "R": {"switches": {"logprob_reuse": True}},
    "S": {"switches": {"chunk_overlap": True}},
}
"""What a user may want beside a switch, and the options that ask for it."""


def cell(switch: switches.Switch, tables: dict[str, dict[str, Any]]) -> str:
    """``works``, or why it is refused: the reason, without the remedy; that of the options, where B is refused too."""
    config = Config.model_validate({"model": {"path": "org/model"}} | tables)
    if switch.on(config):
        return ""
    reasons = [reason.split(": ", 1)[1].split("; ")[0] for reason in switch.guards(config) if ": " in reason]
    bare = [reason for reason in switch.guards(config) if ": " not in reason]
    if reasons or bare:
        return "refused: " + "; ".join([*reasons, *bare])
    everywhere = [problem.text.split(": ", 1)[1].split("; ")[0] for problem in cross_field_problems(config, {})]
    return "refused, as without it: " + "; ".join(everywhere) if everywhere else "works"


def matrix() -> str:
    heads = [f"{switch.letter} (`switches.{switch.name}`)" for switch in switches.ALL]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    lines += [
        f"| {name} | " + " | ".join(cell(switch, tables) for switch in switches.ALL) + " |"
        for name, tables in FEATURES.items()
    ]
    return "\n" + "\n".join(lines) + "\n\n"


def rendered(document: str) -> str:
    """The document with its matrix up to date."""
    head, rest = document.split(BEGIN)
    return head + BEGIN + matrix() + END + rest.split(END)[1]


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
