"""What goes wrong when prefill and decode are apart, as publicly reported on systems of this kind, and the test that it does not here.

One line for each kind of fault: number in our list of reports | the fault in our words | tests that show the right behaviour.

A. Cancel, abort, timeout: who frees
 1 | the source falls silent while the decode side waits: blocks are never reclaimed
   | contracts/test_carriers.py::test_a_source_that_falls_silent_is_lost,
     flow/test_failover.py::test_stalled_transfer_ends_with_the_deadline
 3 | a completion that arrives after the request was freed kills the engine
   | unit/test_vllm_channel.py::test_late_and_unknown_events_are_counted_and_change_nothing,
     unit/test_outbox.py::test_two_readers_of_one_transfer_free_it_once
 4 | the decode side refuses the request after its prefill: the KV there is stranded
   | flow/test_coordinator.py::test_a_refusal_by_the_decode_side_frees_the_prefill_side
 5 | the client leaves before the decode engine knows of the request: the KV leaks
   | flow/test_cancel.py::test_cancel_in_each_phase
 6 | the source frees by a timer, and the reader reads blocks that are another request's by now
   | unit/test_outbox.py::test_a_reader_holds_the_bytes_until_it_leaves,
     contracts/test_carriers.py::test_an_ended_transfer_is_refused_at_once
 7 | a constant timeout is too short under load
   | unit/test_outbox.py::test_an_owner_renews_its_leases,
     contracts/test_carriers.py::test_a_lease_ends_what_nobody_reads_and_spares_what_is_read
 9 | lost, cut, doubled and reordered pieces; failures that nobody is told of; one slow peer in front of all others
   | flow/test_faults.py::test_every_request_ends_right_or_with_a_typed_error_and_nothing_is_left,
     contracts/test_carriers.py::test_faults_at_every_frame_end_in_the_right_bytes_or_a_typed_error,
     contracts/test_carriers.py::test_hundreds_of_pulls_at_once
10 | heartbeats renew one side's lease only
   | unit/test_outbox.py::test_an_owner_renews_its_leases, unit/test_outbox.py::test_an_owner_renews_what_waits_in_the_inbox
11 | one part of a transfer fails and all is freed while other parts are still being written
   | unit/test_vllm_channel.py::test_every_rank_must_end_an_entry, contracts/test_carriers.py::test_random_cancels_leave_nothing
12 | an aborted transfer writes into memory that was given to somebody else
   | contracts/test_carriers.py::test_stopping_at_any_point_frees_everything,
     unit/test_outbox.py::test_an_engine_that_reads_keeps_the_bytes_after_a_release
13 | a cancel reaches one leg, and the other one runs on
   | flow/test_cancel.py::test_a_third_of_200_cancelled_at_random_moments_leaves_nothing,
     flow/test_adaptive.py::test_a_cancelled_prefill_leaves_nothing_on_either_side
14 | cancels leak until nothing moves, and the health endpoint says that all is well
   | flow/test_ops.py::test_a_wedged_pool_is_not_ready_though_its_worker_lives,
     flow/test_failover.py::test_engine_that_is_stuck_loses_its_worker
16 | full buffers on both sides wait for each other
   | flow/test_coordinator.py::test_boxes_smaller_than_two_requests_deadlock_nothing,
     contracts/test_carriers.py::test_fifty_transfers_through_boxes_for_less_than_two
17 | the decode side reads before all is there
   | contracts/test_carriers.py::test_a_prefill_that_ends_too_early_fails_the_pull_at_once,
     contracts/test_carriers.py::test_frames_come_as_they_are_staged
18 | a cancel between the end of the prefill and the start of the decode holds memory until a lease ends
   | e2e/test_vllm_engine.py::test_decode_cancelled_before_it_is_scheduled,
     unit/test_vllm_plan.py::test_a_decode_aborted_before_it_ran_ends_its_entry

B. Lengths and boundaries
20 | the last, partly filled block is not sent
   | contracts/test_carriers.py::test_every_length_arrives_whole, contracts/engine_contract.py::test_lengths_around_blocks_and_chunks
21 | a prompt shorter than a block hangs
   | flow/test_coordinator.py::test_answers_are_right_at_every_length, contracts/engine_contract.py::test_lengths_around_blocks_and_chunks
22 | the decode side has everything in its prefix cache, pulls nothing, and never says so
   | e2e/test_vllm_engine.py::test_the_whole_context_is_cached_on_both_sides
23 | an answer of one token has two
   | contracts/engine_contract.py::test_max_tokens_one_ends_at_the_prefill
24 | the first token ends the answer, and the decode side waits for a KV that never comes
   | flow/test_coordinator.py::test_end_token_first_needs_no_decode,
     contracts/engine_contract.py::test_first_token_that_stops_ends_at_the_prefill
26 | a prompt that is too long is refused by the prefill and answered with garbage by the decode
   | flow/test_coordinator.py::test_request_that_fits_no_worker_is_refused_by_name, e2e/test_parity.py::test_wrong_alike
27 | unlike block sizes pass every check and spoil the answers
   | contracts/test_carriers.py::test_another_layout_is_refused_by_name,
     unit/test_topologies.py::test_faults_that_would_show_only_when_it_runs
28 | a model whose state is not blocks dies in the hand-over
   | e2e/test_vllm_engine_death.py::test_a_model_that_cannot_be_handed_over_is_refused,
     unit/test_vllm_memory.py::test_state_that_is_not_blocks_is_refused

C. The same answers as colocated
29 | of several answers to one prompt only one gets its KV
   | flow/test_answers.py::test_n_answers_each_whole_with_the_seeds_that_vllm_gives_them
30 | logprobs of the prompt crash the decode side or are missing
   | e2e/test_parity.py::test_equal
31 | the first token has no logprobs
   | contracts/engine_contract.py::test_logprobs_come_with_every_token_and_are_equal
32 | limits that belong to the whole answer reach the prefill leg, and are refused there
   | contracts/engine_contract.py::test_min_tokens_holds_over_both_legs,
     contracts/engine_contract.py::test_max_tokens_two_has_one_chunk_of_decode
34 | the first token is sampled twice, differently
   | contracts/engine_contract.py::test_seeded_sampling_is_the_same_on_both_ways,
     e2e/test_serving_real.py::test_cold_answers_equal_colocated_ones_to_the_last_digit
35 | the first token waits for the transfer
   | flow/test_coordinator.py::test_first_token_does_not_wait_for_the_kv,
     e2e/test_serving_real.py::test_the_first_token_does_not_wait_for_the_kv

D. Failure, restart, stale state
37 | a peer comes back, and everybody still talks to its former life
   | flow/test_failover.py::test_the_only_worker_comes_back_with_a_new_epoch,
     contracts/test_carriers.py::test_kill_9_of_the_source_in_the_middle
38 | a stale or used reference brings another prompt's answer
   | contracts/test_carriers.py::test_a_pull_of_something_else_is_refused,
     contracts/test_carriers.py::test_duplicate_fetches_share_one_pull,
     contracts/test_workers.py::test_other_tokens_or_another_epoch_are_refused
39 | a failed prefill is not told to the decode side, which waits
   | contracts/test_carriers.py::test_a_prefill_that_ends_too_early_fails_the_pull_at_once,
     flow/test_failover.py::test_another_worker_takes_over
40 | a failed load strands the request
   | flow/test_failover.py::test_broken_transfer_is_done_again_and_the_answer_is_right,
     flow/test_failover.py::test_attempts_used_up_is_the_last_error
43 | preempted requests prefill again on the decode side, which collapses
   | e2e/test_vllm_engine.py::test_a_preempted_decode_recomputes_and_finishes,
     unit/test_simulated.py::test_a_decode_that_waits_for_room_keeps_its_inbox_until_it_is_loaded
44 | a preemption frees blocks that are still being copied out
   | unit/test_vllm_plan.py::test_a_preempted_prefill_stages_the_rest_from_its_new_blocks,
     unit/test_simulated.py::test_a_preempted_prefill_keeps_what_it_announced

E. Set-up and speed
46 | ports collide, or an address means another host there
   | unit/test_frames.py::test_a_port_in_use_is_a_typed_error, flow/test_ray.py::test_port_in_use_is_told_before_any_worker_loads,
     unit/test_placement.py::test_pairs_share_a_host_where_shared_memory_may_carry
47 | disaggregated is slower than aggregated, and nobody says so
   | unit/test_result.py::test_attainment_decides_before_the_gaps, unit/test_result.py::test_lower_throughput_in_every_round_is_shown
48 | many small pieces move at megabytes per second; unlike parallel degrees mix heads up
   | contracts/test_carriers.py::test_frames_of_megabytes_arrive_whole,
     unit/test_vllm_memory.py::test_a_round_trip_is_exact_and_touches_nothing_else

Beyond the reports: a lost acknowledgement under a gateway that renews (unit/test_outbox.py), a dead peer's box that only an old error
still holds (unit/test_outbox.py), a flipped bit in a header (unit/test_frames.py), strangers at the KV port (contracts/test_kv_port.py).
"""
