//! The target of libFuzzer: an input is a sequence of actions of a hostile process. See
//! `verbs/src/soft/tests/fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tonic_rdma_verbs::unstable::run_input(input));
