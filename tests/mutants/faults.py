"""The faults: each is one line, of a kind that has been made, or nearly, and is not seen by reading."""

from __future__ import annotations

from .trial import Mutant

_OPTIM = [
    Mutant(
        "a bucket is closed although the next parameter just fits",
        "hvdlite/buckets/plan.py",
        "filled[index] + need > cap_bytes",
        "filled[index] + need >= cap_bytes",
        ("tests/buckets/test_plan.py::test_a_bucket_that_is_closed_had_no_room_for_the_next_parameter",),
    ),
    Mutant(
        "aligned gradients overlap",
        "hvdlite/buckets/plan.py",
        "return -(-numel // step) * step",
        "return numel // step * step",
        ("tests/buckets/test_plan.py::test_slices_do_not_overlap_and_lie_before_the_flags",),
    ),
    Mutant(
        "a missing gradient is that of the step before",
        "hvdlite/buckets/bucket.py",
        "            state.view.zero_()\n",
        "",
        ("tests/optim/test_incomplete_steps.py::test_a_grad_scaler_decides_on_averages_whenever_a_step_is_asked_for",),
    ),
    Mutant(
        "gradients that are scaled are scaled once more with the others",
        "hvdlite/buckets/bucket.py",
        "            if state.ready and not state.scaled:",
        "            if state.ready:",
        (
            "tests/exchanges/test_exact_averages.py::test_gradients_that_were_added_to_in_place_and_new_ones_are_scaled_once_each",
        ),
    ),
    Mutant(
        "ranks beyond the first block are counted in the first",
        "hvdlite/buckets/flags.py",
        "counts[self.ranks.rank // RANKS_PER_COUNT]",
        "counts[0]",
        ("tests/buckets/test_flags.py::test_ranks_that_take_part_are_counted_exactly_whatever_travels",),
    ),
    Mutant(
        "ranks that sit out are never in the divisor",
        "hvdlite/buckets/flags.py",
        "or self._size if left_out > 0 else self._size",
        "or self._size if left_out >= 0 else self._size",
        ("tests/buckets/test_flags.py::test_ranks_that_sit_out_and_count_as_zero_leave_the_average_over_all",),
    ),
    Mutant(
        "memory that a collective still writes to is used again",
        "hvdlite/buckets/in_flight.py",
        "            in_flight.bucket.abandon()\n        self._waiting.clear()",
        "            pass\n        self._waiting.clear()",
        ("tests/optim/test_errors.py::test_what_is_under_way_when_a_step_is_given_up_writes_into_no_later_gradient",),
    ),
    Mutant(
        "a residual of another scale is scaled the wrong way",
        "hvdlite/exchanges/residuals.py",
        "part * (scale / old_scale)",
        "part * (old_scale / scale)",
        (
            "tests/exchanges/test_residuals.py::test_a_residual_of_gradients_with_another_factor_gets_that_of_the_next_ones",
        ),
    ),
]

_CONTROL = [
    Mutant(
        "joined ranks are in the divisor of averages over active ones",
        "hvdlite/coordinator/negotiation.py",
        "divisor = len(first.members) - (len(absent) if weighs_active else 0)",
        "divisor = len(first.members)",
        ("tests/coordinator/test_negotiation.py::test_averages_may_be_over_those_that_have_not_joined",),
    ),
    Mutant(
        "a failed operation is told again by each rank that sees it",
        "hvdlite/coordinator/negotiation.py",
        "if number > self._failed.get(label, 0):",
        "if number >= self._failed.get(label, 0):",
        ("tests/coordinator/test_negotiation.py::test_the_first_failure_in_an_operation_is_told_to_the_other_ranks",),
    ),
    Mutant(
        "rank 0 learns of an end before the ranks that it answers",
        "hvdlite/coordinator/negotiation.py",
        "for other in [*range(1, len(scene.hosts)), 0] if other != rank]",
        "for other in scene.everybody if other != rank]",
        ("tests/coordinator/test_negotiation.py::test_the_first_end_is_told_to_all_others",),
    ),
    Mutant(
        "a deadlock of other ranks counts from that of the first",
        "hvdlite/coordinator/deadlocks.py",
        "if self._stuck_since_s is None or self._stuck_since_s[0] != stuck:",
        "if self._stuck_since_s is None:",
        (
            "tests/coordinator/test_negotiation.py::test_ranks_that_come_into_circles_later_are_told_only_once_messages_on_their_way_could_arrive",
        ),
    ),
    Mutant(
        "a rank is stuck though a wait of its report is cut off",
        "hvdlite/control/reports.py",
        "bool(told) and len(told) == len(blocked) and",
        "bool(told) and",
        ("tests/control/test_reports.py::test_a_rank_is_stuck_only_where_all_that_it_waits_for_is_told",),
    ),
    Mutant(
        "the time in which this process was stopped counts as the silence of rank 0",
        "hvdlite/control/reports.py",
        "            self._unanswered_since_s += stopped_s\n",
        "            pass\n",
        ("tests/control/test_reports.py::test_a_rank_that_was_stopped_itself_does_not_blame_rank_0",),
    ),
    Mutant(
        "a joined rank is stalled while others are busy",
        "hvdlite/coordinator/stall.py",
        "return max(since_s, self.asked_at_s) if rank in self._scene.joined else since_s",
        "return since_s",
        (
            "tests/coordinator/test_negotiation.py::test_a_join_is_no_stall_while_the_others_ask_for_operations_and_take_no_step",
        ),
    ),
    Mutant(
        "the name of an answered request stays in use",
        "hvdlite/control/requests.py",
        "            self._names.discard(request.name)\n",
        "            pass\n",
        ("tests/control/test_controller.py::test_ranks_that_differ_get_one_error_and_can_go_on",),
    ),
]

_SHM = [
    Mutant(
        "an operation has room before the one in its place is over",
        "hvdlite/shm/shm_operation.py",
        "return DONE, (self.number - WINDOW) <<",
        "return DONE, (self.number - WINDOW - 1) <<",
        (
            "tests/shm/test_asynchronous.py::test_an_operation_takes_no_place_of_which_another_rank_has_yet_to_read_the_data",
        ),
    ),
    Mutant(
        "a slot is filled while others read it",
        "hvdlite/shm/shm_operation.py",
        "yield DONE, context.read_at[number]",
        "yield DONE, 0",
        ("tests/shm/test_asynchronous.py::test_a_slot_is_filled_again_only_once_the_other_ranks_have_read_it",),
    ),
    Mutant(
        "shares are taken before they are reduced",
        "hvdlite/shm/collectives.py",
        "                yield REDUCED, operation.after(chunk)\n",
        "",
        ("tests/shm/test_reductions.py::test_the_result_may_lie_elsewhere_than_the_tensor_on_some_ranks",),
    ),
    Mutant(
        "a rank's sum is not written to the rank behind it",
        "hvdlite/shm/collectives.py",
        "            for other in terms[1:]:\n",
        "            for other in terms[2:]:\n",
        ("tests/shm/test_reductions.py::test_wherever_tensors_lie_each_rank_has_the_whole_sum",),
    ),
    Mutant(
        "a rank's part of a resident tensor begins at the first one's",
        "hvdlite/shm/collectives.py",
        "where.within + own_start + chunk * cell",
        "where.within + chunk * cell",
        ("tests/shm/test_reductions.py::test_the_parts_may_be_one_tensor_and_the_output_one_of_them",),
    ),
    Mutant(
        "the other ranks are not told that the queue has failed",
        "hvdlite/shm/queue.py",
        "            self._peers.leave(FAILED)\n",
        "            pass\n",
        ("tests/shm/test_asynchronous.py::test_a_rank_that_fails_alone_ends_the_waits_of_the_others",),
    ),
    Mutant(
        "of several reasons the last one counts",
        "hvdlite/shm/peers.py",
        "_, reason = min(block.reason()",
        "_, reason = max(block.reason()",
        ("tests/shm/test_asynchronous.py::test_of_several_reasons_for_which_ranks_are_revoked_the_first_counts",),
    ),
    Mutant(
        "a round that was closed is a go",
        "hvdlite/shm/board.py",
        "        if go:\n",
        "        if number:\n",
        ("tests/control/test_voting.py::test_a_round_that_was_closed_stays_so_when_all_have_voted",),
    ),
]

_RUNTIME = [
    Mutant(
        "the rank that reports last has passed most votes",
        "hvdlite/runtime/survival.py",
        "passed[number] = max(steps, passed.get(number, 0))",
        "passed[number] = steps",
        ("tests/runtime/test_survival.py::test_the_most_votes_that_a_rank_has_passed_count_for_each_optimizer",),
    ),
    Mutant(
        "ranks that gave the step up leave the others waiting",
        "hvdlite/runtime/survival.py",
        "len(ways) > 1,",
        "len(ways) > 2,",
        (
            "tests/runtime/test_survival.py::test_all_go_back_to_a_commit_where_some_have_given_up_the_step_that_others_wait_for",
        ),
    ),
    Mutant(
        "a discarded step is forgotten one step too early",
        "hvdlite/runtime/survival.py",
        "if any(each.passed.get(number, 0) <= step for each in waiting)",
        "if any(each.passed.get(number, 0) < step for each in waiting)",
        ("tests/runtime/test_survival.py::test_a_step_stays_discarded_until_all_ranks_have_come_to_it",),
    ),
    Mutant(
        "a step is tried once less",
        "hvdlite/runtime/survival.py",
        "_TRIES = 4",
        "_TRIES = 3",
        ("tests/runtime/test_survival.py::test_the_same_ranks_try_a_step_three_times",),
    ),
    Mutant(
        "a worker that dies over and over takes the tries of the others",
        "hvdlite/runtime/survival.py",
        "if newcomers or size != self._size:",
        "if size != self._size:",
        ("tests/runtime/test_retry.py::test_a_worker_that_dies_over_and_over_takes_no_try_of_the_others",),
    ),
    Mutant(
        "a rank stays in a step whose end failed",
        "hvdlite/runtime/survival.py",
        "        finally:\n            self._step = None\n",
        "        finally:\n            pass\n",
        ("tests/runtime/test_survival.py::test_a_world_that_cannot_be_entered_ends_the_step",),
    ),
    Mutant(
        "the controller keeps the group of a removed set",
        "hvdlite/runtime/process_set.py",
        "            self._controller.close_group(group)\n",
        "            pass\n",
        ("tests/runtime/test_process_set.py::test_nothing_keeps_the_group_of_a_set_that_was_removed",),
    ),
    Mutant(
        "a set may have the rank behind the last",
        "hvdlite/runtime/process_set.py",
        "if ranks[-1] >= size:",
        "if ranks[-1] > size:",
        ("tests/runtime/test_process_set.py::test_sets_that_cannot_be_are_one_error_on_every_rank_and_leave_no_trace",),
    ),
    Mutant(
        "a stall is told at each look",
        "hvdlite/runtime/hang_report.py",
        "        self._has_told = is_stalled\n",
        "        self._has_told = False\n",
        ("tests/runtime/test_hang_report.py::test_each_wait_that_takes_too_long_is_told_once",),
    ),
]

_LAUNCHER = [
    Mutant(
        "all hosts have cross rank 0",
        "launcher/plan/hosts.py",
        "            cross_ranks[local_rank] += 1\n",
        "            pass\n",
        ("tests/launcher/plan/test_slots.py::test_hosts_of_different_sizes_are_filled_in_order",),
    ),
    Mutant(
        "a host may not have as many slots as its max-slots",
        "launcher/plan/hosts.py",
        'if slots > fields.get("max", slots):',
        'if slots >= fields.get("max", slots):',
        ("tests/launcher/plan/test_hostfile.py::test_every_form_of_a_line_is_read",),
    ),
    Mutant(
        "more workers than cores have no threads",
        "launcher/plan/worker_environment.py",
        "str(max(1, host.cores // host.slots))",
        "str(host.cores // host.slots)",
        ("tests/launcher/plan/test_slots.py::test_more_workers_than_cores_get_one_thread_each",),
    ),
    Mutant(
        "after a failure workers have the longer grace",
        "launcher/workers/ending.py",
        "min(self.grace, FAILURE_GRACE_S)",
        "max(self.grace, FAILURE_GRACE_S)",
        (
            "tests/launcher/job/test_supervisor.py::test_who_ignores_the_signal_is_killed_after_the_grace",
            "tests/launcher/job/test_supervisor.py::test_a_grace_that_is_shorter_than_what_a_failure_gives_counts_there_too",
        ),
    ),
    Mutant(
        "the loop waits for the last alarm, not for the first",
        "launcher/job/supervisor.py",
        "(time_left is None or left < time_left)",
        "(time_left is None or left > time_left)",
        (
            "tests/launcher/job/test_supervisor.py::test_of_several_that_are_to_be_called_at_a_time_each_is_called_at_its_own",
        ),
    ),
    Mutant(
        "a lost agent is waited for, and a key stays locked",
        "launcher/store/server.py",
        "                self._dropped(agent, key)\n\n    def put(",
        "                pass\n\n    def put(",
        ("tests/launcher/store/test_server.py::test_a_host_that_is_lost_holds_up_nobody",),
    ),
    Mutant(
        "the keys of a revoked generation itself stay",
        "launcher/hvdlite_wire/store_requests.py",
        "match is not None and int(match[1]) <= generation",
        "match is not None and int(match[1]) < generation",
        ("tests/launcher/store/test_server.py::test_every_later_request_for_a_key_of_a_generation_that_is_over_fails",),
    ),
    Mutant(
        "what the launcher sends does not end its silence",
        "launcher/protocol/channel.py",
        "        self.hear()\n        if not data:",
        "        if not data:",
        ("tests/launcher/protocol/test_channel.py::test_beats_are_sent_as_long_as_the_launcher_is_heard",),
    ),
    Mutant(
        "workers that are being ended are counted as ranks",
        "launcher/elastic/elastic_workers.py",
        "return self.why_dismissed is None and not self.is_being_ended",
        "return self.why_dismissed is None",
        ("tests/launcher/elastic/test_membership.py::test_when_all_hosts_are_blacklisted_that_is_said_before_the_end",),
    ),
]

MUTANTS: list[Mutant] = [*_OPTIM, *_CONTROL, *_SHM, *_RUNTIME, *_LAUNCHER]
