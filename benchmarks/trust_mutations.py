"""Lines of the store, the watching, the anatomy and the probes that trust rests on.

In the form of ``mutation_list``: (file, tests that must notice) → (line, what it
becomes). Each is a likely mistake: a copy or a reset left out, a sign, a bound off by
one, a lock kept, a check that never fails.
"""

STORE = "tests/store/test_checksums.py tests/store/test_reader.py"
WRITER = "tests/store/test_writer.py tests/store/test_retrying.py " + STORE
LEGAL = "tests/watching/test_legal_loops.py::test_"
READINGS = "tests/watching/test_readings.py::test_"
LOOPS = (
    f"{READINGS}losses_and_gradients_are_the_loops_own {LEGAL}the_norm_that_clips_is"
    f"_of_all_that_is_clipped_of_this_model {LEGAL}lbfgs_records_its_last_evaluation "
    f"{LEGAL}a_wrapper_and_the_optimiser_inside_it_take_one_step "
    f"{LEGAL}parameters_that_are_assigned_are_followed"
)
SCALARS = READINGS + "scalars_join_the_step_that_has_just_ended"
COVERAGE = "tests/watching/test_coverage.py"
CLEANUP = "tests/watching/test_cleanup.py"
HOOKS = "tests/anatomy/test_interception.py"
TRUST: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("store/checksums.py", STORE): (
        ("if checksum(*row[:-1]) == row[-1]:", "if True:"),
        ("if until is not None and after < until:", "if False:"),
        ("            if before > after:\n", "            if False:\n"),
        ("expected is not None and found != expected", "found > (expected or found)"),
        ('damage.note("counts", "totals")', "pass"),
    ),
    ("store/reader.py", STORE): (
        ("until = found[-1][0] if len(found) == limit else end", "until = end"),
        ("after = max(cursor, counts.upgraded)", "after = cursor"),
        (" and rows[1][0] == (last or rows[1][0])", ""),
    ),
    ("store/summaries.py", STORE): (("    ends.load(db, series)\n", ""),),
    ("store/writer.py", WRITER): (
        ("                self._totals = before\n", ""),
        ("self._groups.clear()", "pass"),
        (
            "        self._lock.release()\n                raise\n            try:",
            "        raise\n            try:",
        ),
        ("self._file.abort()\n                self._lock.release()", "pass"),
        ("        finally:\n            self._lock.release()", "        finally: pass"),
        ("self._lock.renew()", "pass"),
        (".fetchone()[0] or 0", ".fetchone()[0] * 0"),
    ),
    ("store/retrying.py", WRITER): (
        ("popleft()\n            self._values -= _size(readings)", "popleft()"),
        ("self._failing, self._dropped = False, 0", "self._failing = False"),
        (
            "for kept, *_ in self._waiting) + self._dropped",
            "for kept, *_ in self._waiting)",
        ),
    ),
    (
        "store/lock.py",
        "tests/store/test_network.py tests/store/test_retrying.py",
    ): (
        ("!= socket.gethostname() or is_alive", "!= socket.gethostname() and is_alive"),
        (
            "            os.close(old)\n            self._sign()",
            "            os.close(old)",
        ),
    ),
    ("store/network.py", "tests/store/test_network.py"): (
        ("or _state(local) < _state(place)", ""),
        ("self._published = appends", "pass"),
    ),
    ("watching/loop_hooks.py", LOOPS): (
        ("loss, scale = _unscaled.get(root, (root, scale))", "loss = root"),
        ("self._began.pop(optimizer, step) != step", "False"),
        (
            "wide = torch.promote_types(norms[-1].dtype, torch.float32)",
            "wide = torch.half",
        ),
    ),
    ("watching/step_readings.py", LOOPS): (
        ("self._ended, self._clipped = None, True, {}", "self._ended = None, True"),
        ("self.reached_model and not in_closure", "self.reached_model"),
        ("or self._replaced()", ""),
    ),
    ("watching/loop_hooks.py", "tests/watching/test_cleanup.py -k twice"): (
        ("attribute) is ours:", 'attribute) is ours and name != "update":'),
    ),
    ("watching/handle.py", SCALARS): (
        (
            "late = self.optimizer is not None and self._schedule.step > 0",
            "late = False",
        ),
    ),
    (
        "watching/handle.py",
        "tests/watching/test_forecast.py tests/watching/test_schedule.py",
    ): (
        ("self._stop = self._stop or self._recorder", "self._stop = self._recorder"),
        ('self._recorder.restore(state.get("pending", ()))', "pass"),
    ),
    (
        "watching/recorder.py",
        f"{SCALARS} {READINGS}findings_and_readings_reach_callback_and_sinks",
    ): (
        ("        self.scalars.pop()\n        merged", "        merged"),
        ("        self._findings = []\n        shared", "        shared"),
        ("if finding not in self.findings]", "]"),
    ),
    ("watching/recorder.py", "tests/autopilot/test_watched.py -k checkpoint"): (
        ("applied, self.applied = self.applied, []", "applied = self.applied"),
    ),
    ("watching/recorder.py", "tests/watching/test_schedule.py -k interval"): (
        ("1 / 2 < interval / old < 2", "False"),
    ),
    ("watching/step_readings.py", "tests/watching/test_step_readings.py"): (
        ("rate.detach().clone() if", "rate.detach() if"),
        ("(2 * _ln(B[s][0]),)", "(_ln(B[s][0]),)"),
    ),
    ("watching/recorder.py", "tests/watching/test_recorder.py"): (
        ("if os.getpid() != process:", "if False:"),
    ),
    ("watching/ranks.py", "tests/watching/test_merge.py"): (
        ("if max(sizes) + 8 > self._capacity:", "if max(sizes) > self._capacity:"),
    ),
    ("watching/sampler.py", "tests/watching/test_schedule.py"): (
        ("-(-step // self.interval) * self.interval", "step // self.interval"),
        ("            if self._depth == 0:\n", "            if True:\n"),
        ("wanted = max(self.every, ", "wanted = min(self.every, "),
    ),
    ("watching/sampler.py", COVERAGE): (
        (
            "        self._capture, self._updated = None, False",
            "        self._updated = False",
        ),
        (
            "self._backward_seen = self._gradients_seen = False\n",
            "self._backward_seen = False\n",
        ),
    ),
    ("watching/coverage.py", COVERAGE): (
        (
            "missed, self._steps_missing = self._steps_missing, {}",
            "missed = self._steps_missing",
        ),
        ("self._reasons_reported.add((site, why))", "pass"),
        (" == 1 and not self.compiled", " == 0"),
    ),
    (
        "watching/coverage.py",
        f"{LEGAL}unseen_steps_hold_one_loss {READINGS}without_an_"
        f"optimiser_step_ends_the_step {LEGAL}gradients_of_autograd_grad_are_read",
    ): (
        ("_unseen_moves == UNSEEN_MOVES", "_unseen_moves == 1"),
        ("or self._steps_without_loss != 2", ""),
    ),
    ("watching/nonfinite.py", "tests/watching/test_nonfinite.py"): (
        ('if name != "loss" or step <= self._last_bad:', 'if name != "loss":'),
        ("self.active and not self._clean_step", "self.active"),
        ("if batch is None or needs_all_ranks(self.model):", "if batch is None:"),
        ("part is None or part.unpack_hook is not None", "part is None"),
        ("users[-1 if before else 0]", "users[0]"),
        ("            if not scaled:\n", "            if True:\n"),
    ),
    ("watching/merge.py", "tests/watching/test_merge.py"): (
        ("math.nan if any(map(math.isnan, column)) else pick(column)", "pick(column)"),
        ("strict=True) if w)", "strict=True))"),
        ("            merged.pop((step, name), None)\n", ""),
        ("place(one) < place(other)", "place(one) > place(other)"),
        ("sum(values) / len(values)", "values[0]"),
    ),
    ("anatomy/hooks.py", HOOKS): (
        (
            "        module._forward_pre_hooks_with_kwargs.pop(self._torch.id, None)\n",
            "",
        ),
        ("torch_modules._global_forward_hooks_with_kwargs.pop(", "(lambda *x: None)("),
        ("for mode in reversed(modes):", "for mode in modes:"),
        ("if output is not None or always_call:", "if True:"),
    ),
    ("anatomy/hooks.py", "tests/watching/test_unusual_loops.py -k thread"): (
        ("if threading.get_ident() == here:", "if True:"),
    ),
    ("anatomy/interception.py", CLEANUP): (
        ("        if self._over:\n            return out\n", ""),
        ("        if self._over and is_active(self):", "        if False:"),
    ),
    ("anatomy/sites.py", "tests/anatomy/test_families.py"): (
        ('+ (self.letter == "v")', '+ (self.letter == "k")'),
        (
            ".repeat_interleave(self.heads // self.kv_heads, 0)",
            ".repeat(self.heads // self.kv_heads, 1, 1)",
        ),
        ("() if lora.merged else lora.active_adapters", "lora.active_adapters"),
        ("    if not weight.is_floating_point():\n", "    if False:\n"),
    ),
    ("anatomy/sharding.py", "tests/anatomy/test_sharding.py"): (
        ("found.part * size + here", "found.part + found.parts * here"),
        ("p.dim % x.ndim == axis", "p.dim == axis"),
        ("_times_split(p) > (id(p) in gathered)", "_times_split(p) > 0"),
        (
            "placement.is_replicate() or placement.is_partial()",
            "placement.is_replicate()",
        ),
    ),
    ("anatomy/calls.py", "tests/anatomy/test_calls.py tests/probes/test_sink.py"): (
        ("theirs.to(_wide(theirs.dtype), copy=True)", "theirs.to(_wide(theirs.dtype))"),
        ("last_Bq - first_Bq + 1 >", "last_Bq - first_Bq >"),
        ("if self.cross or Q != tokens:", "if self.cross:"),
        ("rows // (heads * queries) if heads == H else 1", "rows // (heads * queries)"),
        ("seen_BK.flip(-1).cumsum(-1).flip(-1) > 0", "so_far_BK"),
    ),
    ("probes/window.py", CLEANUP): (
        ("raised = sys.exc_info()[0] is not None", "raised = False"),
        ("while isinstance(top, CallWrapper) and not top._on:", "while False:"),
    ),
    ("probes/window.py", "tests/watching/test_called_by_parts.py -k second"): (
        ("if not wanted or id(module) in self.called:", "if not wanted:"),
    ),
    ("probes/window.py", "tests/watching/test_unusual_loops.py -k thread"): (
        (
            "if self._inside is not None and self._opener == threading.get_ident():",
            "if self._inside is not None:",
        ),
    ),
    (
        "probes/updates.py",
        "tests/probes/test_updates.py tests/probes/test_unchanged_weights.py",
    ): (
        ("before, self._before = self._before, {}\n", "before = self._before\n"),
        ("local_part(parameter.detach()).clone()", "local_part(parameter.detach())"),
        ('state.get("max_exp_avg_sq", state["exp_avg_sq"])\n', 'state["exp_avg_sq"]\n'),
        (
            "self._before[site] = id(parameter), w.clone()",
            "self._before[site] = id(parameter), w",
        ),
        ("        if not self._updated:\n            return\n", ""),
        ("if key == id(parameter) and", "if key and"),
        ("        room -= size\n", ""),
    ),
    (
        "probes/gradients.py",
        "tests/probes/test_backward.py tests/watching/test_readings.py",
    ): (
        ("                norm = norm if scale is None else norm / scale\n", ""),
        ("            if id(parameter) not in seen:\n", "            if True:\n"),
    ),
    ("probes/capture.py", CLEANUP): (
        ("self.failed[name] = failure", "pass"),
        ("with self.around(), torch.no_grad():", "with self.around():"),
    ),
    ("probes/capture.py", "tests/watching/test_merge.py"): (
        ("(new - old.values) / (old.count + 1)", "(new - old.values) / old.count"),
        (
            "self._firsts.get(site, 0) if cell.by_head else 0",
            "self._firsts.get(site, 0)",
        ),
    ),
    (
        "probes/sharding.py",
        "tests/watching/test_merge.py tests/anatomy/test_sharding.py",
    ): (
        ("    if len(counts) != 1:\n", "    if not counts:\n"),
        ("if not p.is_replicate())", "if p.is_shard())"),
    ),
}
