"""Lines that ``mutations`` breaks, what they become, and the tests that must notice."""

from dataclasses import dataclass

from benchmarks.trust_mutations import TRUST

WATCHING, LAB = "src/equipoise/watching/", "lab/src/equipoise_lab/training/"
ROWS, FLOW = "src/equipoise/numerics/rows/", "src/equipoise/anatomy/softmax_flow.py"
PREDICTION = "src/equipoise/auditing/precision/prediction.py"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One line, what it becomes, and the tests that must notice."""

    file: str
    old: str
    new: str
    tests: str


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        WATCHING + "loop/torch_events.py",
        "    loss = loss.detach().clone()\n",
        "    loss = loss.detach()\n",
        "tests/watching/test_legal_loops.py -k in_place",
    ),
    Mutation(
        WATCHING + "loop/torch_events.py",
        "            listener.before_clipping(norm.clone(), parameters)\n",
        "            listener.before_clipping(norm, parameters)\n",
        "tests/watching/test_legal_loops.py -k clips",
    ),
    Mutation(
        WATCHING + "ranks/merge.py",
        "        cost=max(message.cost for message in messages),\n",
        "        cost=min(message.cost for message in messages),\n",
        "tests/watching/test_merge.py",
    ),
    Mutation(
        WATCHING + "ranks/merge.py",
        "        plain=min(message.plain for message in messages),\n",
        "        plain=max(message.plain for message in messages),\n",
        "tests/watching/test_merge.py",
    ),
    Mutation(
        WATCHING + "ranks/merge.py",
        "    if len({*counts}) == 1:\n",
        "    if True:\n",
        "tests/watching/test_merge.py",
    ),
    Mutation(
        PREDICTION,
        "    left = max(0.0, 1 - n / M)\n",
        "    left = 1.0\n",
        "tests/auditing/precision/test_prediction.py",
    ),
    Mutation(
        PREDICTION,
        "        larger = math.sqrt(y.numel() / view.numel()) / size\n",
        "        larger = 1 / size\n",
        "tests/auditing/precision/test_prediction.py",
    ),
    Mutation(
        FLOW,
        "        extra_keys=extra,\n",
        "        extra_keys=0,\n",
        "tests/anatomy tests/probes/test_sink.py",
    ),
    Mutation(
        "src/equipoise/anatomy/multihead.py",
        "        extra_keys=extra,\n",
        "        extra_keys=0,\n",
        "tests/anatomy",
    ),
    Mutation(
        "src/equipoise/anatomy/calls.py",
        "torch.minimum(first_BQ, first_BQ.gather(1, first_BQ))",
        "first_BQ",
        "tests/probes/test_sink.py",
    ),
    Mutation(
        "src/equipoise/probes/row_sample.py",
        "    first = rows // _FIRST\n",
        "    first = 0\n",
        "tests/probes/test_row_sample.py",
    ),
    Mutation(
        "src/equipoise/probes/row_sample.py",
        "    square_n = (weight_n * (weight_n - 1))[n // _FIRST :]\n",
        "    square_n = weight_n.square()[n // _FIRST :]\n",
        "tests/probes/test_row_sample.py",
    ),
    Mutation(
        "src/equipoise/probes/attention.py",
        "        scores_HN, masses_HN = scores_HN * weight_N, masses_HN * weight_N\n",
        "        pass\n",
        "tests/probes/test_row_sample.py -k weights",
    ),
    Mutation(
        "src/equipoise/numerics/spectra/tracking.py",
        "    if other.value > one.value:\n",
        "    if False:\n",
        "tests/numerics/spectra/test_tracking.py",
    ),
    Mutation(
        "src/equipoise/numerics/spectra/tracking.py",
        "    second_N = second_N - first_N * (first_N @ second_N)\n",
        "    second_N = second_N + 0\n",
        "tests/numerics/spectra/test_tracking.py",
    ),
    Mutation(
        "src/equipoise/probes/sharding.py",
        "    return [norm if ranks == 1 else norm * ranks**-0.5 for norm in norms]\n",
        "    return list(norms)\n",
        "tests/anatomy/test_sharding.py",
    ),
    Mutation(
        ROWS + "window.py",
        "                begin, end, proven = s, s + 1, False\n",
        "                begin, end, proven = s, s + 1, True\n",
        "tests/numerics/rows/test_window.py::test_the_nearest_subset_sum",
    ),
    Mutation(
        ROWS + "window.py",
        "            high, mass, missing = middle, above, most - count\n",
        "            high, mass, missing = middle, above, most\n",
        "tests/numerics/rows/test_window.py -k nearly_equal",
    ),
    Mutation(
        ROWS + "window.py",
        "            while at > _KEYS and room[at - 1] < p_K[k]:\n",
        "            while False:\n",
        "tests/numerics/rows/test_statistics.py -k largest_first",
    ),
    Mutation(
        LAB + "trainer.py",
        "            total += loss.detach() / parts\n",
        "            total += loss.detach()\n",
        "lab/tests/test_trainer.py",
    ),
    Mutation(
        LAB + "trainer.py",
        "        self.tokens += y.numel() * share().world\n",
        "        self.tokens += y.numel()\n",
        "lab/tests/test_trainer.py",
    ),
    Mutation(
        LAB + "trainer.py",
        "        if limit is None or self._unread or not read:\n",
        "        if limit is None or not read:\n",
        "lab/tests/test_trainer.py",
    ),
    Mutation(
        LAB + "checkpoint.py",
        '    _restore_random(mine["random"])\n',
        "    pass\n",
        "lab/tests/test_resume.py",
    ),
    Mutation(
        LAB + "checkpoint.py",
        "        for old in finished(folder)[:-KEEP]:\n",
        "        for old in finished(folder)[:-1]:\n",
        "lab/tests/test_resume.py lab/tests/test_trainer.py",
    ),
    Mutation(
        LAB + "checkpoint.py",
        "    if written != at.world:\n",
        "    if False:\n",
        "lab/tests/test_resume.py lab/tests/test_trainer.py",
    ),
    Mutation(
        LAB + "checkpoint.py",
        "    if target.exists():",
        "    if False:",
        "lab/tests/test_trainer.py -k checkpoint",
    ),
)
# The autopilot, judging, words and remedies: file → tests, lines and what they become.
PILOT: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    (
        "autopilot/pilot.py",
        "tests/autopilot/test_pilot.py tests/autopilot/test_trial.py",
    ): (
        ("HARM = 1.05", "HARM = 1.5"),
        ("USUAL, IN_A_ROW = 1.15, 4", "USUAL, IN_A_ROW = 9.0, 4"),
        ("step - course.step >= PATIENCE", "False"),
        ("self.state.used < self.options.most", "True"),
        ('not is_at_best(judge.history.curve("loss"))', "True"),
        ("settling = judge.history.step < state.settled", "settling = False"),
        ("max(self.options.apart, distance)", "self.options.apart"),
        ('if not all(proposal.back_to in one["held"] for one in every):', "if False:"),
        ('agreed = every[0]["chosen"]', 'agreed = every[-1]["chosen"]'),
        ('if agreed["answer"] is None:', "if False:"),
        ('        if agreed["answer"]:\n', "        if True:\n"),
        ("        if self.only_says:\n", "        if False:\n"),
        ("            self.only_says = True\n", "            pass\n"),
        ("if found.nonfinite and proposal.back_to is None:", "if False:"),
        ("            restore(present, self.model, optimizer)\n", "            pass\n"),
        (
            "            self._withdraw(step, text, back_to=course.back_to)",
            "            self._withdraw(step, text)",
        ),
        (
            "        for undo in reversed(self._undos.pop()):\n            undo()",
            "        self._undos.pop()",
        ),
        ("        restore(loaded, self.model, optimizer)\n", "        pass\n"),
        ("                undo.progress.update(progress)", "                pass"),
        ("wanted = found.began - treatment.margin", "wanted = found.began"),
        (
            "near = [s for s in self.snapshots.kept if s.step >= oldest]",
            "near = self.snapshots.kept",
        ),
        ("            if not passes:\n", "            if False:\n"),
        ("if not steps or treatment.until_usual:", "if not steps:"),
        ("self.snapshots.forget_after(kept[0].step)", "pass"),
    ),
    ("autopilot/snapshots.py", "tests/autopilot/test_snapshots.py"): (
        ("optimizer.state.pop(p, None)", "pass"),
        ("            del self.kept[1]", "            del self.kept[0]"),
        ("if room < 2:", "if room < 1:"),
        ("min(KEPT, room)", "KEPT"),
    ),
    ("autopilot/treatments.py", "tests/autopilot/test_treatments.py"): (
        ('about.get(f.code) == "model"', "True"),
        (
            'return e.fires("gradient.spike") and not e.fires(*blown_up)',
            'return e.fires("gradient.spike")',
        ),
        ("changes = treatment.again or treatment.name not in active", "changes = True"),
        ("too_fast = e.rate_grew or e.fires", "too_fast = e.fires"),
        ("e.epsilon > LARGE_EPSILON or e.beta2 < LOW_BETA2", "e.beta2 < LOW_BETA2"),
    ),
    ("judging/rules/conditions.py", "tests/judging/test_conditions.py"): (
        ("    if len(found) <= MOST:", "    if True:"),
        ("        if self._past >= rule.recover:", "        if True:"),
        ("if self._beyond < self.rule.persist:", "if False:"),
    ),
    ("judging/judge.py", "tests/judging/test_conditions.py"): (
        ("self.note(f for f in found if f.code == FAILED)", "pass"),
        ('lost = judge.of == "weights" and any', "lost = any"),
    ),
    ("judging/settings.py", "tests/judging/test_verdict.py"): (
        ("if m and m.since <= step <= m.until + AFTER]", "if m]"),
    ),
    ("judging/rules/activations.py", "tests/judging/test_rules.py"): (
        ("    return total < BY_CHANCE / experts", "    return True"),
    ),
    ("judging/rules/run.py", "tests/judging/test_rules.py"): (
        ("    if began > PLAIN * uniform:\n", "    if False:\n"),
        ("        return max(uniform, began), ", "        return uniform, "),
        ("value = share if loss > AT_CHANCE * uniform else 0.0", "value = share"),
    ),
    ("judging/rules/attention.py", "tests/judging/test_rules.py"): (
        ("logit if theta < SATURATED else 0.0", "logit"),
    ),
    ("text/verdict_text.py", "tests/text/test_verdict_text.py"): (
        ("reversed(said) if verdict.recovered else said", "said"),
        ('    if lead.code == "nonfinite.update":', "    if False:"),
    ),
    ("autopilot/trial.py", "tests/autopilot/test_trial.py"): (
        ("        before.restore()", "        pass"),
        ("            restore(snapshot, model, optimizer)", "            pass"),
        (
            "inner, its_optimizer = copy.deepcopy((unwrapped(model), optimizer))",
            "inner, its_optimizer = unwrapped(model), optimizer",
        ),
    ),
    ("remedies/weights.py", "tests/remedies/test_weights.py"): (
        (
            "near = (here - exact).norm() <= ROUNDED * exact.norm()",
            "near = torch.tensor(True)",
        ),
        (
            ".clamp(max=1.0)\n        local_part(p.detach()).mul_",
            "\n        local_part(p.detach()).mul_",
        ),
    ),
    ("remedies/gradients.py", "tests/remedies/test_weights.py"): (
        ("self.options.always or self._is_far(size)", "self._is_far(size)"),
    ),
    (
        "remedies/losses.py",
        "src/equipoise/remedies/losses.py tests/remedies/test_effects.py",
    ): ((".clamp(max=0.0)", ""),),
}
TRITON = "tests/numerics/rows/test_triton_rows.py"
# Of the device's path, in the same form.
DEVICE: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("numerics/rows/triton_kernel.py", TRITON): (
        ("value + margin + 128.0 * _UNIT * away", "value - margin"),
        (
            "((where_second == tile) & (count > 0))",
            "((where_second == tile) & (count > 1))",
        ),
    ),
    ("numerics/rows/triton_kernel.py", TRITON + " -k causal"): (
        ("(key[None, :] < hi[:, None])", "(key[None, :] <= hi[:, None])"),
    ),
    ("numerics/rows/triton_kernel.py", TRITON + " -k grouped"): (
        ("(head // group)", "(head * 0)"),
        (".to(tl.float32) * scale", ".to(tl.float32)"),
    ),
    ("numerics/rows/triton_kernel.py", TRITON + " -k ALiBi"): (
        ("z -= slope", "z += slope"),
    ),
    ("numerics/rows/triton_kernel.py", TRITON + " -k soft-cap"): (
        ("z = cap * _tanh(z / cap)", "z = _tanh(z / cap)"),
    ),
    ("numerics/rows/triton_kernel.py", TRITON + " -k mask"): (
        ("seen = seen & (given != 0)", "seen = seen"),
        ("seen = seen & ~(z <= MASKED)", "seen = seen"),
    ),
    ("numerics/rows/triton_kernel.py", TRITON + " -k documents"): (
        ("[None, :] == first_key[:, None]", "[None, :] == 0"),
    ),
    ("numerics/rows/triton_kernel.py", TRITON + " -k NaN"): (
        ("unread = unread | (z != z).to(tl.int32)", "unread = unread"),
    ),
    ("numerics/rows/triton_kernel.py", TRITON + " -k chosen"): (
        (
            "row = tl.load(chosen_at + place, mask=real, other=0).to(tl.int64)",
            "row = row",
        ),
    ),
    ("probes/fused_rows.py", TRITON + " -k padding"): (
        ("        sees_4BQ[3] = first_BQ\n", "        pass\n"),
        ("    return read_CBHn.transpose(1, 2)", "    return read_CBHn"),
    ),
    ("probes/fused_rows.py", TRITON + " -k chosen"): (
        ("        chosen_n=chosen_n,\n", "        chosen_n=None,\n"),
    ),
    ("probes/fused_rows.py", TRITON + " -k ALiBi"): (
        ("        slopes=rows.slopes_BH,\n", "        slopes=None,\n"),
    ),
    ("anatomy/fused_kernels.py", TRITON + " -k window"): (
        (
            "torch.minimum(end_SQ, own_SQ + right + 1)",
            "torch.minimum(end_SQ, own_SQ + right)",
        ),
        ("own_SQ - self.left)", "own_SQ - self.left - 1)"),
    ),
    ("anatomy/fused_kernels.py", TRITON + " -k documents"): (
        ("own_SQ = first_SQ + self.place[0]", "own_SQ = 0 + self.place[0]"),
    ),
    ("numerics/rows/torch_rows.py", "tests/numerics/rows/test_torch_rows.py"): (
        ("begin_N1 >= torch.searchsorted(", "begin_N1 + 9 >= torch.searchsorted("),
        ("w_NK.scatter_(1, place_Nm[:, :_DEALT], 0.0)", "w_NK.clone()"),
        ("row_Nm * _GROUPS + at_K", "row_Nm + at_K"),
        ("> 0).sum(-1) == (w_NK > 0).sum(-1)", "> 0).sum(-1) > 0"),
        ("until_Nrc - before_Nrc).to", "until_Nrc).to"),
        ("next_Nf + others_N1), 1)", "next_Nf + others_N1 / 2), 1)"),
    ),
    ("anatomy/fused_kernels.py", "tests/anatomy/test_fused_kernels.py"): (
        ("at_L < starts.diff()[:, None]", "at_L <= starts.diff()[:, None]"),
        ("offset_S=k.shape[1] - q.shape[1]", "offset_S=0"),
    ),
    ("numerics/compiled.py", "tests/watching/test_no_wait.py -k ranks"): (
        ("pinned.to(device, non_blocking=True)", "pinned.to(device)"),
    ),
    ("watching/handle.py", "tests/watching/test_recorder.py"): (
        ("not (step.sampled and self._sampler.late)", "True"),
    ),
    ("probes/sharding.py", "tests/watching/test_no_wait.py -k arriv"): (
        ("event is None or event.query()", "event is None or True"),
        ("event.synchronize()", "pass"),
    ),
    ("watching/step/pipeline.py", "tests/watching/test_no_wait.py -k arriv"): (
        ("self.scalars.extend(newer)", "pass"),
    ),
}
MUTATIONS += tuple(
    Mutation("src/equipoise/" + file, old, new, tests)
    for (file, tests), lines in (*PILOT.items(), *DEVICE.items(), *TRUST.items())
    for old, new in lines
)
EQUIVALENT = {
    "if limit is None or self._unread or not read:": (
        "losses are looked at anew only when more are read: the answer is the last one"
    ),
}
"""The old line of a mutation that nothing can notice → why."""
