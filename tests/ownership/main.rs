//! What the compiler refuses: memory in flight can't be touched, and what has arrived can't outlive its buffer. Its words for
//! that are beside the cases; `TRYBUILD=overwrite` writes them anew for a compiler that says it otherwise.

#[test]
#[ignore = "builds every dependency once more, which takes minutes the first time: `.ci/nightly` runs it"]
fn memory_in_flight_is_out_of_reach() {
    trybuild::TestCases::new().compile_fail("tests/ownership/*/*.rs");
}
