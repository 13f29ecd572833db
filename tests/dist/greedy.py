"""Greedy decoding without a cache, by forward passes of the whole pipeline: what other ways of decoding must give."""


def prompts_and_answers(run, most: int) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """(prompt, greedy answer, true answer) of the held-out samples of a first step, by number, in tokens; on ranks of a
    language model of one stage."""
    import torch

    from mimo_train.evaluation.held_out import evaluating
    from mimo_train.evaluation.predictions import PredictStep

    iterator, tokenizer = run.session.held_out(all_logits=True), run.session.parts.tokenizer
    iterator.advance()
    found: dict[int, tuple[list[int], list[int], list[int]]] = {}
    texts = [microbatch for microbatch in iterator.current.microbatches if "input_ids" in microbatch]
    for text in texts:
        for number, ids, mask, labels in zip(
            text["sample_numbers"].tolist(), text["input_ids"], text["loss_mask"], text["labels"], strict=True
        ):
            learned = mask.nonzero().flatten()
            begin = int(learned[0]) + 1
            found[number] = ids[:begin].tolist(), [], labels[learned].tolist()
            ids[begin:] = tokenizer.pad_id
    with evaluating(run.model), torch.no_grad():
        for _ in range(most):
            iterator.rewind()
            passed = run.pipeline.run(
                PredictStep(run.pipeline), iterator, forward_only=True, collect_non_loss_data=True
            )
            for text, predicted in zip(texts, passed if texts else (), strict=True):
                for row, number in enumerate(text["sample_numbers"].tolist()):
                    prompt, answer, _ = found[number]
                    place = len(prompt) + len(answer)
                    if place < text["input_ids"].size(1) and not (answer and answer[-1] in tokenizer.template.stop_ids):
                        answer.append(int(predicted["predicted"][row, place - 1]))
                        text["input_ids"][row, place] = tokenizer.as_text(answer[-1])
    iterator.close()
    return found
