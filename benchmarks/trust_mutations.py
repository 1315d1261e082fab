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
    ("watching/step/machine.py", "tests/watching/test_machine.py"): (
        ("not (event.in_update or step.stepped)", "True"),
        (
            'return replace(step, source="replayed"), (Effect.REPLAY,)',
            "return step, (Effect.REPLAY,)",
        ),
        ("step.phase is Phase.OPEN or event.in_backward:", "step.phase is Phase.OPEN:"),
    ),
    ("watching/loop/gradient_marks.py", LOOPS): (("or self._follow_replaced()", ""),),
    ("watching/step/readings.py", "tests/watching/test_step_readings.py"): (
        ("rate.detach().clone() if", "rate.detach() if"),
        ("(2 * _ln(B[s][0]),)", "(_ln(B[s][0]),)"),
    ),
    ("watching/step/pipeline.py", "tests/watching/test_recorder.py"): (
        ("if os.getpid() != process:", "if False:"),
    ),
    ("watching/ranks/group.py", "tests/watching/test_merge.py"): (
        ("if max(sizes) + 8 > self._capacity:", "if max(sizes) > self._capacity:"),
    ),
    ("watching/step/schedule.py", "tests/watching/test_schedule.py"): (
        ("            if self._depth == 0:\n", "            if True:\n"),
        ("wanted = max(self.every, ", "wanted = min(self.every, "),
    ),
    ("watching/ranks/merge.py", "tests/watching/test_merge.py"): (
        ("strict=True) if w)", "strict=True))"),
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
}
