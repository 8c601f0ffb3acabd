//! Transcripts of a requester: events and the actions that follow.

use tonic::Code;

use super::*;
use crate::wire::tensor_frame::Announcement;

type Action = RequesterAction<&'static str>;

fn requester() -> Requester<&'static str> {
    Requester::new(RequesterSettings::default())
}

fn asks(id: u64, step: u64, lengths: Option<&[u64]>) -> Action {
    let (request_id, sink) = (RequestId(id), lengths.map(|lengths| sink(metadata(lengths))));
    let request = TensorRequest { request_id, name: "loss".into(), step, sink, checksum_wanted: false };
    RequesterAction::Send(request_id, Frame::Request(request))
}

fn allocate(id: u64, lengths: &[u64]) -> Action {
    RequesterAction::Allocate { request_id: RequestId(id), metadata: metadata(lengths) }
}

fn cancel(id: u64) -> Action {
    RequesterAction::Send(RequestId(id), Frame::Cancel { request_id: RequestId(id) })
}

fn finished(id: u64, result: RequestOutcome<&'static str>) -> Action {
    RequesterAction::Finished { request_id: RequestId(id), result }
}

fn arrived(id: u64, lengths: &[u64], sink: &'static str) -> Action {
    arrived_at(id, 1, lengths, sink)
}

fn arrived_at(id: u64, step: u64, lengths: &[u64], sink: &'static str) -> Action {
    finished(id, RequestOutcome::Arrived(arrival(step, lengths, sink)))
}

fn arrival(step: u64, lengths: &[u64], sink: &'static str) -> Arrival<&'static str> {
    Arrival { name: "loss".into(), step, metadata: metadata(lengths), sink, checksum: None }
}

fn failed(id: u64, code: Code, text: &str) -> Action {
    finished(id, RequestOutcome::Failed(Failure::new(code, text)))
}

/// Returns a requester whose request 0 has a sink for a tensor of 2 × 3.
fn exposed() -> Requester<&'static str> {
    let mut requester = requester();
    requester.request("loss", 1).unwrap();
    requester.handle_metadata(RequestId(0), metadata(&[2, 3])).unwrap();
    requester.sink_ready(RequestId(0), "sink", place(24));
    requester
}

#[test]
fn the_first_request_asks_for_metadata_and_the_next_one_has_a_sink() {
    let mut requester = requester();
    assert_eq!(requester.request("loss", 1), Ok((RequestId(0), asks(0, 1, None))));
    assert_eq!(requester.handle_metadata(RequestId(0), metadata(&[2, 3])), Ok(vec![allocate(0, &[2, 3])]));
    assert_eq!(requester.sink_ready(RequestId(0), "a", place(24)), [asks(0, 1, Some(&[2, 3]))]);
    assert_eq!(requester.handle_written(RequestId(0), None), Ok(vec![arrived(0, &[2, 3], "a")]));

    assert_eq!(requester.request("loss", 2), Ok((RequestId(1), allocate(1, &[2, 3]))));
    assert_eq!(requester.sink_ready(RequestId(1), "b", place(24)), [asks(1, 2, Some(&[2, 3]))]);
    assert_eq!(requester.handle_written(RequestId(1), None), Ok(vec![arrived_at(1, 2, &[2, 3], "b")]));
    assert_eq!(requester.pending(), 0);
}

#[test]
fn another_shape_means_another_sink() {
    let mut requester = exposed();
    let actions = requester.handle_metadata(RequestId(0), metadata(&[9]));
    let state = "with a sink made for the metadata that the peer sent";
    let twice = Violation::Unexpected { frame: "metadata", request_id: RequestId(0), state };
    assert_eq!(actions, Err(twice), "the metadata comes once");

    let mut requester = exposed();
    requester.handle_written(RequestId(0), None).unwrap();
    requester.request("loss", 2).unwrap();
    requester.sink_ready(RequestId(1), "old", place(24));
    let actions = requester.handle_metadata(RequestId(1), metadata(&[9]));
    assert_eq!(actions, Ok(vec![RequesterAction::Free("old"), allocate(1, &[9])]));
    let sink = sink(metadata(&[9]));
    let [RequesterAction::Send(_, Frame::Request(TensorRequest { sink: Some(sent), .. }))] =
        &requester.sink_ready(RequestId(1), "new", place(36))[..]
    else {
        panic!("no request");
    };
    assert_eq!(*sent, sink);
    assert_eq!(requester.handle_written(RequestId(1), None), Ok(vec![arrived_at(1, 2, &[9], "new")]));
    assert_eq!(requester.request("loss", 3), Ok((RequestId(2), allocate(2, &[9]))));
}

#[test]
fn statuses_and_death_free_the_sink() {
    let mut requester = exposed();
    let actions = requester.handle_status(RequestId(0), 10, "the loss is NaN");
    assert_eq!(actions, Ok(vec![RequesterAction::Free("sink"), failed(0, Code::Aborted, "the loss is NaN")]));
    requester.request("loss", 2).unwrap();
    requester.sink_ready(RequestId(1), "sink", place(24));
    let actions = requester.handle_dead(RequestId(1));
    assert_eq!(actions, Ok(vec![RequesterAction::Free("sink"), finished(1, RequestOutcome::Dead)]));
    requester.request("gain", 2).unwrap();
    assert_eq!(requester.handle_dead(RequestId(2)), Ok(vec![finished(2, RequestOutcome::Dead)]));
    assert_eq!(requester.pending(), 0);
}

#[test]
fn the_sink_of_a_cancelled_request_stays_until_the_last_answer() {
    for last in 0..3 {
        let mut requester = exposed();
        assert_eq!(requester.cancel(RequestId(0)), [cancel(0)]);
        assert_eq!(requester.cancel(RequestId(0)), [], "cancelled already");
        assert_eq!(requester.pending(), 1);
        let mut freed = match last {
            0 => requester.handle_written(RequestId(0), None).unwrap(),
            1 => requester.handle_status(RequestId(0), 1, "cancelled").unwrap(),
            _ => requester.peer_gone("it crashed"),
        };
        if last == 0 {
            assert_eq!(freed, [], "the tensor is kept for another request");
            freed = requester.peer_gone("it crashed");
        }
        assert_eq!(freed, [RequesterAction::Free("sink")], "a cancelled request has no result");
        assert_eq!(requester.pending(), 0);
    }
}

/// The provider counts a tensor as delivered once it has written it, so this side keeps what arrives too
/// late.
#[test]
fn a_tensor_that_arrives_for_nobody_is_for_the_next_request() {
    let mut requester = exposed();
    requester.cancel(RequestId(0));
    assert_eq!(requester.handle_written(RequestId(0), None), Ok(vec![]));
    assert_eq!(requester.request("loss", 1), Ok((RequestId(1), arrived(1, &[2, 3], "sink"))));
    assert_eq!(requester.pending(), 0);
    // The program has not looked at this result.
    assert_eq!(requester.not_taken(arrival(1, &[2, 3], "sink")), []);
    assert_eq!(requester.request("loss", 1), Ok((RequestId(2), arrived(2, &[2, 3], "sink"))));
    // It is for this tensor alone, and once.
    requester.not_taken(arrival(1, &[2, 3], "sink"));
    assert_eq!(requester.request("loss", 2), Ok((RequestId(3), allocate(3, &[2, 3]))));
    assert_eq!(requester.request("loss", 1).unwrap().1, arrived(4, &[2, 3], "sink"));
    assert_eq!(requester.request("loss", 1), Ok((RequestId(5), allocate(5, &[2, 3]))));
}

#[test]
fn a_tensor_that_arrives_late_is_for_the_request_that_asks_again() {
    let gave_up = || {
        let mut requester = exposed();
        assert_eq!(requester.cancel(RequestId(0)), [cancel(0)]);
        assert_eq!(requester.request("loss", 1), Ok((RequestId(1), allocate(1, &[2, 3]))));
        requester
    };
    // The second request has no sink yet, so the peer does not know of it.
    let mut requester = gave_up();
    assert_eq!(requester.handle_written(RequestId(0), None), Ok(vec![arrived(1, &[2, 3], "sink")]));
    assert_eq!(requester.sink_ready(RequestId(1), "late", place(24)), [RequesterAction::Free("late")]);
    assert_eq!(requester.pending(), 0);
    // The peer refuses the second request, because it has written the tensor. Until then the second sink
    // stays.
    let mut requester = gave_up();
    assert_eq!(requester.sink_ready(RequestId(1), "second", place(24)), [asks(1, 1, Some(&[2, 3]))]);
    let actions = requester.handle_written(RequestId(0), None);
    assert_eq!(actions, Ok(vec![arrived(1, &[2, 3], "sink"), cancel(1)]));
    let actions = requester.handle_status(RequestId(1), 6, "was delivered already");
    assert_eq!(actions, Ok(vec![RequesterAction::Free("second")]));
    assert_eq!(requester.pending(), 0);
    // The peer has learnt in time that the first reader gave up, and writes the second sink.
    let mut requester = gave_up();
    requester.sink_ready(RequestId(1), "second", place(24));
    let actions = requester.handle_status(RequestId(0), 1, "cancelled");
    assert_eq!(actions, Ok(vec![RequesterAction::Free("sink")]));
    assert_eq!(requester.handle_written(RequestId(1), None), Ok(vec![arrived(1, &[2, 3], "second")]));
    assert_eq!(requester.pending(), 0);
}

#[test]
fn tensors_that_nobody_takes_are_bounded_in_number_and_time() {
    let settings = RequesterSettings { max_requests: 2, ..RequesterSettings::default() };
    let mut requester = Requester::<&str>::new(settings);
    assert_eq!(requester.not_taken(arrival(1, &[2], "1")), []);
    assert_eq!(requester.not_taken(arrival(2, &[2], "2")), []);
    assert_eq!(requester.not_taken(arrival(3, &[2], "3")), [RequesterAction::Free("1")]);
    assert_eq!(requester.age_untaken(), [], "from now on they are old");
    assert_eq!(requester.not_taken(arrival(4, &[2], "4")), [RequesterAction::Free("2")]);
    assert_eq!(requester.age_untaken(), [RequesterAction::Free("3")]);
    assert_eq!(requester.age_untaken(), [RequesterAction::Free("4")]);
    requester.not_taken(arrival(5, &[2], "5"));
    assert_eq!(requester.free_untaken(), [RequesterAction::Free("5")]);
    requester.peer_gone("it crashed");
    assert_eq!(requester.not_taken(arrival(6, &[2], "6")), [RequesterAction::Free("6")]);
}

#[test]
fn tensors_that_nobody_takes_are_bounded_in_bytes() {
    let mut requester = requester();
    let long = |step, mebibytes: u64, sink| Arrival {
        metadata: WireMetadata { bytes: mebibytes << 20, ..metadata(&[2]) },
        ..arrival(step, &[2], sink)
    };
    assert_eq!(requester.not_taken(long(9, 100, "first")), []);
    assert_eq!(requester.not_taken(long(5, 156, "second")), []);
    assert_eq!(requester.not_taken(long(7, 1, "third")), [RequesterAction::Free("first")]);
    assert_eq!(requester.not_taken(long(5, 255, "again")), [RequesterAction::Free("second")]);
    let freed = requester.not_taken(long(1, 1024, "the newest, of any length"));
    assert_eq!(freed, [RequesterAction::Free("third"), RequesterAction::Free("again")]);
    assert_eq!(requester.not_taken(long(2, 1, "last")), [RequesterAction::Free("the newest, of any length")]);
    assert_eq!(requester.free_untaken(), [RequesterAction::Free("last")]);
}

#[test]
fn a_request_that_waits_for_a_sink_is_cancelled() {
    // The peer knows of the request, and has to answer.
    let mut requester = requester();
    requester.request("loss", 1).unwrap();
    requester.handle_metadata(RequestId(0), metadata(&[2, 3])).unwrap();
    assert_eq!(requester.cancel(RequestId(0)), [cancel(0)]);
    assert_eq!(requester.sink_ready(RequestId(0), "late", place(24)), [RequesterAction::Free("late")]);
    assert_eq!(requester.handle_status(RequestId(0), 1, "cancelled"), Ok(vec![]));
    // The peer does not know of this request.
    assert_eq!(requester.request("loss", 2), Ok((RequestId(1), allocate(1, &[2, 3]))));
    assert_eq!(requester.cancel(RequestId(1)), []);
    assert_eq!(requester.sink_ready(RequestId(1), "late", place(24)), [RequesterAction::Free("late")]);
    assert_eq!(requester.pending(), 0);
}

#[test]
fn metadata_and_cancel_may_cross() {
    let mut requester = requester();
    requester.request("loss", 1).unwrap();
    assert_eq!(requester.cancel(RequestId(0)), [cancel(0)]);
    assert_eq!(requester.handle_metadata(RequestId(0), metadata(&[2])), Ok(vec![]));
    assert_eq!(requester.handle_status(RequestId(0), 1, "cancelled"), Ok(vec![]));
    assert_eq!(requester.pending(), 0);
}

#[test]
fn a_request_without_a_sink_is_cancelled() {
    let no_memory = || Failure::new(Code::ResourceExhausted, "no memory");
    let mut requester = requester();
    requester.request("loss", 1).unwrap();
    requester.handle_metadata(RequestId(0), metadata(&[2, 3])).unwrap();
    let expected = [failed(0, Code::ResourceExhausted, "no memory"), cancel(0)];
    assert_eq!(requester.sink_failed(RequestId(0), no_memory()), expected);
    assert_eq!(requester.sink_failed(RequestId(0), no_memory()), [], "the request is over");
    assert_eq!(requester.handle_status(RequestId(0), 1, "cancelled"), Ok(vec![]));
    assert_eq!(
        requester.request("loss", 2),
        Ok((RequestId(1), asks(1, 2, None))),
        "the requester asks for the metadata again"
    );

    let mut requester = exposed();
    requester.handle_written(RequestId(0), None).unwrap();
    requester.request("loss", 2).unwrap();
    let actions = requester.sink_ready(RequestId(1), "short", place(23));
    let [RequesterAction::Finished { result: RequestOutcome::Failed(failure), .. }, free] = &actions[..]
    else {
        panic!("{actions:?}");
    };
    assert!(failure.text.contains("23") && failure.text.contains("24"), "{failure}");
    assert_eq!(*free, RequesterAction::Free("short"));
    assert_eq!(requester.pending(), 0);
}

#[test]
fn a_long_tensor_is_refused_before_an_allocation() {
    let settings = RequesterSettings { max_tensor_bytes: 100, ..RequesterSettings::default() };
    let mut requester = Requester::<&str>::new(settings);
    requester.request("loss", 1).unwrap();
    let actions = requester.handle_metadata(RequestId(0), metadata(&[26])).unwrap();
    let [RequesterAction::Finished { result: RequestOutcome::Failed(failure), .. }, last] = &actions[..]
    else {
        panic!("{actions:?}");
    };
    assert_eq!(failure.code, Code::ResourceExhausted);
    assert!(failure.text.contains("104") && failure.text.contains("100"), "{failure}");
    assert_eq!(*last, cancel(0));
}

#[test]
fn invalid_requests_are_errors() {
    let settings = RequesterSettings { max_requests: 1, ..RequesterSettings::default() };
    let mut requester = Requester::<&str>::new(settings);
    for length in [0, 1025, 10 << 20] {
        let error = requester.request(&"n".repeat(length), 1).unwrap_err();
        assert!(error.reason().contains(&format!("has {length} bytes")), "{error}");
    }
    requester.request("loss", 1).unwrap();
    let error = requester.request("gain", 1).unwrap_err();
    assert!(error.reason().starts_with("1 requests wait"), "{error}");
    let why = "the link has ended: it crashed";
    assert_eq!(requester.peer_gone("it crashed"), [failed(0, Code::Unavailable, why)]);
    let error = requester.request("gain", 1).unwrap_err();
    assert_eq!(error.to_string(), why);
}

#[test]
fn the_cache_forgets_the_least_recently_used_name() {
    let settings = RequesterSettings { max_cached: 2, ..RequesterSettings::default() };
    let mut requester = Requester::<&str>::new(settings);
    let is_cached = |requester: &mut Requester<_>, name: &str| {
        let (request_id, action) = requester.request(name, 9).unwrap();
        requester.cancel(request_id);
        matches!(action, RequesterAction::Allocate { .. })
    };
    for name in ["a", "b", "a", "c"] {
        let (request_id, action) = requester.request(name, 1).unwrap();
        if matches!(action, RequesterAction::Send(..)) {
            requester.handle_metadata(request_id, metadata(&[1])).unwrap();
        }
    }
    assert_eq!(["a", "c", "b"].map(|name| is_cached(&mut requester, name)), [true, true, false]);

    let nothing = RequesterSettings { max_cached: 0, ..RequesterSettings::default() };
    let mut requester = Requester::<&str>::new(nothing);
    requester.request("a", 1).unwrap();
    requester.handle_metadata(RequestId(0), metadata(&[1])).unwrap();
    assert!(!is_cached(&mut requester, "a"));
}

#[test]
fn wrong_answers_are_violations() {
    let unexpected = |frame, state| Violation::Unexpected { frame, request_id: RequestId(0), state };
    let unknown = |frame, id| Violation::Unknown { frame, request_id: RequestId(id) };

    let mut requester = requester();
    requester.request("loss", 1).unwrap();
    assert_eq!(requester.handle_written(RequestId(4), None), Err(unknown("written", 4)));
    assert_eq!(requester.handle_status(RequestId(4), 5, ""), Err(unknown("status", 4)));
    assert_eq!(requester.handle_dead(RequestId(4)), Err(unknown("dead", 4)));
    assert_eq!(requester.handle_metadata(RequestId(4), metadata(&[1])), Err(unknown("metadata", 4)));
    assert_eq!(requester.handle_written(RequestId(0), None), Err(unexpected("written", "without a sink")));

    requester.handle_metadata(RequestId(0), metadata(&[2, 3])).unwrap();
    let waiting = "waiting for a sink";
    assert_eq!(requester.handle_written(RequestId(0), None), Err(unexpected("written", waiting)));
    assert_eq!(requester.handle_metadata(RequestId(0), metadata(&[1])), Err(unexpected("metadata", waiting)));
    let there = "for a tensor whose metadata the peer sent";
    assert_eq!(requester.handle_dead(RequestId(0)), Err(unexpected("dead", there)));

    let mut requester = exposed();
    let wanted = Violation::Checksum { request_id: RequestId(0), wanted: false };
    assert_eq!(requester.handle_written(RequestId(0), Some(1)), Err(wanted));
    requester.handle_written(RequestId(0), None).unwrap();
    assert_eq!(requester.handle_written(RequestId(0), None), Err(unknown("written", 0)), "answered twice");
    // The peer does not know of this request.
    requester.request("loss", 2).unwrap();
    assert_eq!(requester.handle_status(RequestId(1), 5, ""), Err(unknown("status", 1)));
    // Metadata that is equal to the sink's is a violation.
    requester.sink_ready(RequestId(1), "sink", place(24));
    assert!(requester.handle_metadata(RequestId(1), metadata(&[2, 3])).is_err());
}

#[test]
fn with_validation_each_tensor_has_a_checksum() {
    let settings = RequesterSettings { validate: true, ..RequesterSettings::default() };
    let mut requester = Requester::<&str>::new(settings);
    let (_, action) = requester.request("loss", 1).unwrap();
    assert!(matches!(
        action,
        RequesterAction::Send(_, Frame::Request(TensorRequest { checksum_wanted: true, .. }))
    ));
    requester.handle_metadata(RequestId(0), metadata(&[2])).unwrap();
    requester.sink_ready(RequestId(0), "sink", place(8));
    let missing = Violation::Checksum { request_id: RequestId(0), wanted: true };
    assert_eq!(requester.handle_written(RequestId(0), None), Err(missing));
    assert!(missing.to_string().contains("without"), "{missing}");
    let expected = super::checksum(b"8 bytes.");
    let checksum = Some(expected);
    let actions = requester.handle_written(RequestId(0), checksum).unwrap();
    assert_eq!(
        actions,
        [finished(0, RequestOutcome::Arrived(Arrival { checksum, ..arrival(1, &[2], "sink") }))]
    );
    assert_eq!(verify(RequestId(0), b"8 bytes.", expected), Ok(()));
    let mismatch = verify(RequestId(0), b"8 bytes,", expected).unwrap_err();
    let text = mismatch.reason();
    assert!(text.contains("8 bytes") && text.contains(&format!("{expected:#018x}")), "{text}");
}

/// Immediate data carries the low 31 bits of a request's number.
#[test]
fn immediate_data_finds_its_request() {
    const SPAN: u64 = 1 << 31;
    for first in [0, 5, SPAN - 2, SPAN - 1, SPAN, 7 * SPAN - 1] {
        let mut requester = requester();
        requester.count_from(first);
        let ids = [first, first + 1, first + 2];
        for id in ids {
            requester.request("loss", id).unwrap();
            if id == first {
                requester.handle_metadata(RequestId(id), metadata(&[2])).unwrap();
            }
            requester.sink_ready(RequestId(id), "sink", place(8));
        }
        for id in ids.into_iter().rev() {
            let number = (id % SPAN) as u32;
            assert_eq!(
                Announcement::decode(Announcement::of(RequestId(id)).encode()),
                Announcement::Written(number)
            );
            assert_eq!(requester.handle_announced(number), Ok(vec![arrived_at(id, id, &[2], "sink")]));
            let twice = Violation::Unknown { frame: "written", request_id: RequestId(id) };
            assert_eq!(requester.handle_announced(number), Err(twice));
        }
        assert_eq!(requester.pending(), 0);
    }
    assert_eq!(Announcement::decode(12), Announcement::Placed(12));
}

#[test]
fn forged_immediate_data_is_a_violation() {
    let unknown = |id| Err(Violation::Unknown { frame: "written", request_id: RequestId(id) });
    let mut requester = requester();
    assert_eq!(requester.handle_announced(0), unknown(0), "nothing was ever asked");
    assert_eq!(requester.handle_announced(u32::MAX >> 1), unknown((1 << 31) - 1));
    requester.request("loss", 1).unwrap();
    let state = "without a sink";
    let early = Violation::Unexpected { frame: "written", request_id: RequestId(0), state };
    assert_eq!(requester.handle_announced(0), Err(early), "nothing could be written");
    let error = Violation::Unknown { frame: "written", request_id: RequestId(3) };
    assert_eq!(
        error.to_string(),
        "the answer \"written\" is for request 3, which does not wait for an answer"
    );

    let settings = RequesterSettings { validate: true, ..RequesterSettings::default() };
    let mut requester = Requester::<&str>::new(settings);
    requester.request("loss", 1).unwrap();
    requester.handle_metadata(RequestId(0), metadata(&[2])).unwrap();
    requester.sink_ready(RequestId(0), "sink", place(8));
    let missing = Violation::Checksum { request_id: RequestId(0), wanted: true };
    assert_eq!(requester.handle_announced(0), Err(missing), "immediate data has no room for a checksum");
}

/// Otherwise its answer could be taken for that of a later request.
#[test]
fn no_request_waits_for_longer_than_immediate_data_can_tell() {
    let mut requester = requester();
    requester.request("loss", 1).unwrap();
    requester.count_from((1 << 31) - 1);
    requester.request("gain", 1).unwrap();
    let error = requester.request("gain", 2).unwrap_err();
    assert_eq!(error.to_string(), "request 0 waits for an answer, and the next number is 2^31 or more above");
    requester.handle_dead(RequestId(0)).unwrap();
    assert_eq!(requester.request("gain", 2).unwrap().0, RequestId(1 << 31));
}

/// The number of queue pairs need not divide 2^31.
#[test]
fn immediate_data_finds_its_request_among_those_of_three_queue_pairs() {
    const PAIRS: u64 = 3;
    let settings = RequesterSettings { queue_pairs: PAIRS, ..RequesterSettings::default() };
    let names: Vec<_> = (0..100).map(|number| format!("tensor {number}")).collect();
    let mut found = Requester::<&str>::new(settings);
    let pair_of =
        |requester: &mut Requester<&str>, name: &str| requester.request(name, 1).unwrap().0.0 % PAIRS;
    let first = names.iter().find(|name| pair_of(&mut found, name) == 0).unwrap();
    let mut requester = Requester::<&str>::new(settings);
    let oldest = requester.request(first, 1).unwrap().0;
    assert_eq!(oldest, RequestId(0));
    requester.handle_metadata(oldest, metadata(&[2])).unwrap();
    requester.sink_ready(oldest, "sink", place(8));
    requester.count_from((1 << 31) / PAIRS - 1);
    requester.request(first, 2).unwrap();
    let refused = requester.request(first, 3).unwrap_err();
    assert!(refused.reason().starts_with("request 0 waits"), "{refused}");
    let arrived = requester.handle_announced(0).unwrap();
    assert!(
        matches!(arrived[..], [RequesterAction::Finished { request_id: RequestId(0), .. }]),
        "{arrived:?}"
    );
    requester.request(first, 3).unwrap();
}
