"""The engine inside a loop of your own, in both ways that it can be called.

python -m experiments.examples.own_loop
"""

import jax

from tlt_jax.models import pretrained, transformer
from tlt_jax.spec import noise
from tlt_jax.spec.engine import Engine, EngineConfig
from tlt_jax.spec.request import Group, Sampling


def main(model: pretrained.Pretrained):
    text = model.tokenizer
    questions = ["Name a colour of the rainbow.", "What is two plus three?"]
    prompts = [text.chat([{"role": "user", "content": q}]) for q in questions]
    config = EngineConfig.fit(rows=8, prompt_tokens=64, new_tokens=32)
    engine = Engine(model.config, config, text.eos_ids)
    weights = transformer.decode_layout(model.config, model.params)

    # All at once: a list of responses per prompt.
    for answers in engine.generate(weights, prompts, samples=2, sampling=Sampling(32)):
        print([text.decode(r.tokens) for r in answers])

    # Step by step: each segment of rounds is dispatched, polled and collected by you.
    groups = [Group(tuple(ids), draw, 4, noise.GENERATE) for draw, ids in enumerate(prompts)]
    session = engine.start(weights, groups, sampling=Sampling(32), run_key=jax.random.key(1))
    while not session.done:
        session.dispatch()  # returns at once; the device works
        for r in session.collect():  # waits for the segment; finished responses only
            print(r.group.draw, r.member, r.finish_reason, float(r.log_probs.sum()))


if __name__ == "__main__":
    main(pretrained.load("smollm2"))
