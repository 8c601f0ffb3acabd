//! Transcripts of a provider: events and the actions that follow.

use tonic::Code;

use super::*;
use crate::error::TensorErrorKind;
use crate::wire::tensor_frame::MAX_NAME;

const PS: PeerId = PeerId(1);
const OTHER: PeerId = PeerId(2);
const TIMEOUT: Duration = Duration::from_secs(60);

type Action = ProviderAction<&'static str>;

/// A provider with a clock.
struct Clocked {
    provider: Provider<&'static str>,
    now: Instant,
}

fn provider() -> Clocked {
    provider_with(ProviderSettings::default())
}

fn provider_with(settings: ProviderSettings) -> Clocked {
    Clocked { provider: Provider::new(settings), now: Instant::now() }
}

impl Clocked {
    fn offer(&mut self, name: &str, step: u64, readers: u32) -> Vec<Action> {
        self.try_offer(name, step, OfferedTensor::Tensor("tensor", metadata(&[2, 3])), readers).unwrap()
    }

    fn try_offer(
        &mut self,
        name: &str,
        step: u64,
        offer: OfferedTensor<&'static str>,
        readers: u32,
    ) -> Result<Vec<Action>, TensorError> {
        self.provider.offer(name, step, offer, readers, self.now)
    }

    fn ask(&mut self, peer: PeerId, id: u64, step: u64, sink: Option<TensorMemory>) -> Vec<Action> {
        self.ask_for(peer, id, "loss", step, sink)
    }

    fn ask_for(
        &mut self,
        peer: PeerId,
        id: u64,
        name: &str,
        step: u64,
        sink: Option<TensorMemory>,
    ) -> Vec<Action> {
        let (request_id, name) = (RequestId(id), name.into());
        let request = TensorRequest { request_id, step, sink, checksum_wanted: false, name };
        self.provider.handle_request(peer, &request, self.now)
    }

    fn cancel(&mut self, peer: PeerId, id: u64) -> Vec<Action> {
        self.provider.handle_cancel((peer, RequestId(id)), self.now)
    }

    fn written(&mut self, peer: PeerId, id: u64) -> Vec<Action> {
        self.provider.written((peer, RequestId(id)), self.now)
    }

    fn pass(&mut self, time: Duration) -> Vec<Action> {
        self.now += time;
        self.provider.handle_timeout(self.now)
    }
}

fn write(peer: PeerId, id: u64, lengths: &[u64]) -> Action {
    let sink = sink(metadata(lengths));
    ProviderAction::Write { reader: (peer, RequestId(id)), tensor: "tensor", sink, checksum_wanted: false }
}

fn sent(peer: PeerId, id: u64, frame: Frame<'static>) -> Action {
    ProviderAction::Send { reader: (peer, RequestId(id)), frame }
}

fn metadata_to(peer: PeerId, id: u64, lengths: &[u64]) -> Action {
    let request_id = RequestId(id);
    sent(peer, id, Frame::Metadata { request_id, metadata: metadata(lengths) })
}

/// Checks that the one action is a status with this code for this request, and returns its text.
#[track_caller]
fn refused(actions: &[Action], to: PeerId, id: u64, expected: Code) -> String {
    match actions {
        [ProviderAction::Send { reader: (peer, request_id), frame: Frame::Status { code, text, .. } }] => {
            assert_eq!((*peer, *request_id, *code), (to, RequestId(id), expected as u32), "{text}");
            text.to_string()
        }
        other => panic!("{other:?}"),
    }
}

fn fitting_sink() -> Option<TensorMemory> {
    Some(sink(metadata(&[2, 3])))
}

#[test]
fn a_request_matches_an_earlier_or_a_later_offer() {
    let mut tensor_first = provider();
    assert_eq!(tensor_first.offer("loss", 1, 1), []);
    assert_eq!(tensor_first.ask(PS, 1, 1, fitting_sink()), [write(PS, 1, &[2, 3])]);
    assert_eq!(tensor_first.written(PS, 1), []);

    let mut request_first = provider();
    assert_eq!(request_first.ask(PS, 1, 1, fitting_sink()), []);
    assert_eq!(request_first.offer("loss", 2, 1), [], "another step");
    assert_eq!(request_first.offer("gain", 1, 1), [], "another name");
    assert_eq!(request_first.offer("loss", 1, 1), [write(PS, 1, &[2, 3])]);
    assert_eq!(request_first.written(PS, 1), []);

    assert!(tensor_first.provider.is_idle());
    assert_eq!(request_first.provider.held(), OfferCounts { offers: 2, bytes: 48, requests: 0 });
}

#[test]
fn a_requester_without_metadata_gets_it_and_asks_again() {
    let mut provider = provider();
    provider.offer("loss", 1, 1);
    assert_eq!(provider.ask(PS, 1, 1, None), [metadata_to(PS, 1, &[2, 3])]);
    assert_eq!(provider.ask(PS, 1, 1, fitting_sink()), [write(PS, 1, &[2, 3])]);
    assert_eq!(provider.written(PS, 1), []);
    assert!(provider.provider.is_idle());

    provider.offer("loss", 2, 1);
    let old_shape = Some(sink(metadata(&[3, 3])));
    assert_eq!(provider.ask(PS, 2, 2, old_shape), [metadata_to(PS, 2, &[2, 3])]);
    assert_eq!(provider.ask(PS, 2, 2, fitting_sink()), [write(PS, 2, &[2, 3])]);
}

#[test]
fn a_share_is_kept_for_the_peer_that_got_the_metadata() {
    let mut provider = provider();
    provider.ask(PS, 1, 1, None);
    provider.ask(OTHER, 9, 1, fitting_sink());
    assert_eq!(provider.offer("loss", 1, 1), [metadata_to(PS, 1, &[2, 3])]);
    assert_eq!(provider.cancel(PS, 7), [], "no such request");
    let again = provider.cancel(PS, 1);
    assert_eq!(again[1..], [write(OTHER, 9, &[2, 3])], "the share goes to the next request");
    refused(&again[..1], PS, 1, Code::Cancelled);
    assert_eq!(provider.written(OTHER, 9), []);
    assert!(provider.provider.is_idle());
}

#[test]
fn a_tensor_of_no_bytes_is_written_at_once() {
    let mut provider = provider();
    let nothing = metadata(&[0, 3]);
    provider.try_offer("loss", 1, OfferedTensor::Tensor("tensor", nothing), 1).unwrap();
    let request = TensorRequest {
        request_id: RequestId(1),
        step: 1,
        sink: Some(sink(nothing)),
        checksum_wanted: true,
        name: "loss".into(),
    };
    let actions = provider.provider.handle_request(PS, &request, provider.now);
    let written = Frame::Written { request_id: RequestId(1), checksum: Some(checksum(&[])) };
    assert_eq!(actions, [sent(PS, 1, written)]);
    assert!(provider.provider.is_idle());
}

#[test]
fn the_announcement_has_a_checksum_if_the_request_asks_for_it() {
    for checksum_wanted in [true, false] {
        let mut provider = provider();
        provider.offer("loss", 1, 1);
        let request = TensorRequest {
            request_id: RequestId(1),
            step: 1,
            sink: fitting_sink(),
            checksum_wanted,
            name: "loss".into(),
        };
        let actions = provider.provider.handle_request(PS, &request, provider.now);
        let [ProviderAction::Write { checksum_wanted: found, .. }] = &actions[..] else {
            panic!("{actions:?}");
        };
        assert_eq!(*found, checksum_wanted);
    }
}

#[test]
fn each_reader_learns_of_dead_and_failed_tensors() {
    let mut provider = provider();
    provider.ask(PS, 1, 1, None);
    let dead = |peer, id| sent(peer, id, Frame::Dead { request_id: RequestId(id) });
    assert_eq!(provider.try_offer("loss", 1, OfferedTensor::Dead, 2), Ok(vec![dead(PS, 1)]));
    assert_eq!(provider.ask(OTHER, 5, 1, fitting_sink()), [dead(OTHER, 5)]);
    let failed = OfferedTensor::Failed(Failure::new(Code::Aborted, "the loss is NaN"));
    provider.try_offer("loss", 2, failed, 1).unwrap();
    assert_eq!(refused(&provider.ask(PS, 2, 2, fitting_sink()), PS, 2, Code::Aborted), "the loss is NaN");
    assert!(provider.provider.is_idle());
}

#[test]
fn nothing_is_delivered_twice() {
    let mut provider = provider();
    provider.ask(PS, 1, 1, None);
    let pending = refused(&provider.ask(PS, 2, 1, None), PS, 2, Code::AlreadyExists);
    assert!(pending.contains("\"loss\" of step 1") && pending.contains("pending"), "{pending}");
    provider.offer("loss", 1, 3);
    provider.ask(PS, 1, 1, fitting_sink());
    assert_eq!(provider.written(PS, 1), []);
    let delivered = refused(&provider.ask(PS, 3, 1, fitting_sink()), PS, 3, Code::AlreadyExists);
    assert!(delivered.contains("delivered"), "{delivered}");
    refused(&provider.ask(PS, 1, 9, fitting_sink()), PS, 1, Code::AlreadyExists);
    assert_eq!(provider.ask(OTHER, 1, 1, fitting_sink()), [write(OTHER, 1, &[2, 3])], "other peers may");
}

#[test]
fn a_repeated_number_ends_the_request_with_this_number() {
    let mut provider = provider();
    provider.ask(PS, 1, 1, fitting_sink());
    refused(&provider.ask_for(PS, 1, "gain", 5, fitting_sink()), PS, 1, Code::AlreadyExists);
    assert_eq!(provider.offer("loss", 1, 1), [], "no request waits for it any more");

    assert_eq!(provider.ask(OTHER, 1, 1, fitting_sink()), [write(OTHER, 1, &[2, 3])]);
    for step in [1, 2] {
        assert_eq!(provider.ask(OTHER, 1, step, fitting_sink()), [], "the write announces itself");
    }
    assert_eq!(provider.provider.held().offers, 1, "it is still being written");
    assert_eq!(provider.written(OTHER, 1), []);
    assert!(provider.provider.is_idle());
}

#[test]
fn a_sink_that_does_not_fit_is_refused() {
    let good = sink(metadata(&[2, 3]));
    let far = RemoteSegment { address: u64::MAX - 22, ..good.place.start };
    let cases = [
        (
            TensorMemory { place: RemoteRange { length: 23, ..good.place }, ..good },
            "23 bytes for a tensor of 24",
        ),
        (TensorMemory { place: RemoteRange { start: far, ..good.place }, ..good }, "beyond all addresses"),
    ];
    for (bad, expected) in cases {
        let mut provider = provider();
        provider.offer("loss", 1, 1);
        let first = refused(&provider.ask(PS, 1, 1, Some(bad)), PS, 1, Code::InvalidArgument);
        assert!(first.contains(expected), "{first}");
        provider.ask(PS, 2, 1, None);
        let again = refused(&provider.ask(PS, 2, 1, Some(bad)), PS, 2, Code::InvalidArgument);
        assert!(again.contains(expected), "{again}");
        assert_eq!(
            provider.ask(PS, 3, 1, fitting_sink()),
            [write(PS, 3, &[2, 3])],
            "the tensor is still there"
        );
    }
}

#[test]
fn the_repeated_request_needs_a_fitting_sink_for_its_tensor() {
    let other_type = WireMetadata { dtype: 12, ..metadata(&[2, 3]) };
    let cases = [
        ("loss", 1, None, "without a sink"),
        ("loss", 2, fitting_sink(), "for another"),
        ("gain", 1, fitting_sink(), "for another"),
        ("loss", 1, Some(sink(metadata(&[3, 2]))), "not made for"),
        ("loss", 1, Some(sink(other_type)), "not made for"),
    ];
    for (name, step, sink, expected) in cases {
        let mut provider = provider();
        provider.offer("loss", 1, 1);
        assert_eq!(provider.ask(PS, 1, 1, None), [metadata_to(PS, 1, &[2, 3])]);
        let text = refused(&provider.ask_for(PS, 1, name, step, sink), PS, 1, Code::InvalidArgument);
        assert!(text.contains(expected), "{text}");
        assert_eq!(
            provider.ask(OTHER, 1, 1, fitting_sink()),
            [write(OTHER, 1, &[2, 3])],
            "other peers are not affected"
        );
    }
}

#[test]
fn names_that_no_frame_carries_are_refused() {
    let mut provider = provider();
    let text =
        refused(&provider.ask_for(PS, 1, &"n".repeat(MAX_NAME + 1), 1, None), PS, 1, Code::InvalidArgument);
    assert!(text.contains("1025") && text.contains("1024"), "{text}");
    refused(&provider.ask_for(PS, 2, "", 1, None), PS, 2, Code::InvalidArgument);
    refused(&provider.ask(PS, 2, 1, None), PS, 2, Code::AlreadyExists);
    assert!(provider.provider.is_idle());
}

#[test]
fn requests_of_a_peer_are_bounded() {
    let mut provider =
        provider_with(ProviderSettings { max_requests_per_peer: 2, ..ProviderSettings::default() });
    provider.ask(PS, 1, 1, None);
    provider.ask(PS, 2, 2, None);
    refused(&provider.ask(PS, 3, 3, None), PS, 3, Code::ResourceExhausted);
    assert_eq!(provider.ask(OTHER, 3, 3, None), [], "other peers are not affected");
    refused(&provider.cancel(PS, 1), PS, 1, Code::Cancelled);
    assert_eq!(provider.ask(PS, 4, 3, None), []);
}

#[test]
fn offers_are_bounded() {
    let settings = ProviderSettings { max_offers: 2, max_bytes: 30, ..ProviderSettings::default() };
    let mut provider = provider_with(settings);
    let tensor = |lengths: &[u64]| OfferedTensor::Tensor("tensor", metadata(lengths));
    let mut refused = |name: &str, step, offer, readers, kind, text: &str| {
        let error = provider.try_offer(name, step, offer, readers).unwrap_err();
        assert!(error.kind() == kind && error.reason().contains(text), "{error:?}, not {kind:?} {text:?}");
    };
    let invalid = TensorErrorKind::InvalidArgument;
    refused("", 1, tensor(&[1]), 1, invalid, "has 0 bytes, and 1 to 1024");
    refused("loss", 1, tensor(&[1]), 0, invalid, "tensor \"loss\" of step 1 is offered to no reader");
    refused(
        "loss",
        1,
        tensor(&[8]),
        1,
        invalid,
        "32 bytes beside 0 bytes that wait for their readers, of 30",
    );
    let no_failure = OfferedTensor::Failed(Failure::new(Code::Ok, ""));
    refused("loss", 1, no_failure, 1, invalid, "with the code of success");
    assert!(provider.provider.is_idle());
    provider.try_offer("loss", 1, tensor(&[2]), 1).unwrap();
    let mut refused = |step, offer, kind, text: &str| {
        let error = provider.try_offer("loss", step, offer, 1).unwrap_err();
        assert!(error.kind() == kind && error.reason().contains(text), "{error:?}, not {kind:?} {text:?}");
    };
    refused(1, OfferedTensor::Dead, TensorErrorKind::NameTaken, "on offer already");
    let endless = WireMetadata { bytes: u64::MAX, ..metadata(&[1]) };
    refused(2, OfferedTensor::Tensor("tensor", endless), invalid, "beside 8 bytes");
    refused(2, tensor(&[6]), TensorErrorKind::Busy, "beside 8 bytes");
    provider.try_offer("loss", 2, tensor(&[5]), 1).unwrap();
    let error = provider.try_offer("loss", 3, OfferedTensor::Dead, 1).unwrap_err();
    assert_eq!(error.kind(), TensorErrorKind::Busy);
    assert!(error.reason().starts_with("2 offers wait"), "{error}");
    assert_eq!(provider.provider.withdraw("loss", 1), Some(1));
    assert_eq!(provider.provider.withdraw("loss", 1), None);
    assert_eq!(provider.try_offer("loss", 3, OfferedTensor::Dead, 1), Ok(vec![]));
}

#[test]
fn shares_of_a_lost_peer_go_to_other_peers() {
    let mut provider = provider();
    for (step, sink) in [(1, fitting_sink()), (2, None), (3, fitting_sink())] {
        provider.ask(PS, step, step, sink);
    }
    provider.ask(OTHER, 7, 1, fitting_sink());
    assert_eq!(provider.offer("loss", 1, 1), [write(PS, 1, &[2, 3])]);
    assert_eq!(provider.offer("loss", 2, 1), [metadata_to(PS, 2, &[2, 3])]);
    assert_eq!(provider.provider.peer_gone(PS, provider.now), [write(OTHER, 7, &[2, 3])]);
    assert_eq!(provider.written(PS, 1), [], "a completion after the end of the link");
    assert_eq!(provider.written(OTHER, 7), []);
    assert_eq!(provider.ask(OTHER, 8, 2, fitting_sink()), [write(OTHER, 8, &[2, 3])]);
    assert_eq!(provider.written(OTHER, 8), []);
    assert!(provider.provider.is_idle());
}

/// The requester keeps a tensor that arrives for a request that it has cancelled, so the share is used up.
#[test]
fn a_cancellation_during_the_write_comes_too_late() {
    let mut provider = provider();
    provider.offer("loss", 1, 1);
    assert_eq!(provider.ask(PS, 1, 1, fitting_sink()), [write(PS, 1, &[2, 3])]);
    for _ in 0..2 {
        assert_eq!(provider.cancel(PS, 1), [], "the write announces itself");
    }
    let again = refused(&provider.ask(PS, 2, 1, fitting_sink()), PS, 2, Code::AlreadyExists);
    assert!(again.contains("pending"), "{again}");
    assert_eq!(provider.provider.held(), OfferCounts { offers: 1, bytes: 24, requests: 1 });
    assert_eq!(provider.written(PS, 1), []);
    assert_eq!(provider.cancel(PS, 1), [], "over");
    assert!(refused(&provider.ask(PS, 3, 1, None), PS, 3, Code::AlreadyExists).contains("delivered"));
    assert!(provider.provider.is_idle());
}

#[test]
fn a_reader_that_gives_up_has_one_share_at_a_time() {
    let mut provider = provider();
    provider.offer("loss", 1, 2);
    provider.ask(PS, 1, 1, fitting_sink());
    provider.cancel(PS, 1);
    for id in 2..9 {
        refused(&provider.ask(PS, id, 1, fitting_sink()), PS, id, Code::AlreadyExists);
    }
    assert_eq!(provider.ask(OTHER, 1, 1, fitting_sink()), [write(OTHER, 1, &[2, 3])], "its share is free");
    provider.ask(PeerId(3), 1, 1, fitting_sink());
    let actions = provider.provider.write_failed((PS, RequestId(1)), "no memory", provider.now);
    refused(&actions[..1], PS, 1, Code::Internal);
    assert_eq!(actions[1..], [write(PeerId(3), 1, &[2, 3])], "the next reader gets its share");
    assert_eq!(provider.ask(PS, 9, 1, fitting_sink()), [], "it may ask again");
    assert_eq!(provider.provider.peer_gone(PeerId(3), provider.now), [write(PS, 9, &[2, 3])]);
    assert_eq!(provider.written(OTHER, 1), []);
    assert_eq!(provider.written(PS, 9), []);
    assert!(provider.provider.is_idle());
}

#[test]
fn a_reader_that_gives_up_and_dies_leaves_its_share() {
    let mut provider = provider();
    provider.offer("loss", 1, 1);
    for peer in [PeerId(3), PeerId(4)] {
        assert_eq!(provider.ask(peer, 5, 1, fitting_sink()), [write(peer, 5, &[2, 3])]);
        provider.cancel(peer, 5);
        assert_eq!(provider.provider.peer_gone(peer, provider.now), [], "no answer to a peer that is gone");
        assert_eq!(provider.written(peer, 5), [], "a completion after the end of the link");
    }
    assert_eq!(provider.ask(PS, 1, 1, fitting_sink()), [write(PS, 1, &[2, 3])]);
    assert_eq!(provider.provider.withdraw("loss", 1), Some(0));
    assert_eq!(provider.written(PS, 1), []);
    assert!(provider.provider.is_idle());
}

/// An answer without a tensor may reach a reader that has given up, and the reader asks again.
#[test]
fn dead_and_failed_answers_are_sent_again() {
    let failed = || OfferedTensor::Failed(Failure::new(Code::Aborted, "the loss is NaN"));
    let dead = |id| sent(PS, id, Frame::Dead { request_id: RequestId(id) });
    // While the offer has other readers, and when it has gone.
    for readers in [1, 2] {
        let max_remembered = if readers == 1 { 2 } else { 0 };
        let mut provider = provider_with(ProviderSettings { max_remembered, ..ProviderSettings::default() });
        provider.try_offer("loss", 1, OfferedTensor::Dead, readers).unwrap();
        provider.try_offer("loss", 2, failed(), readers).unwrap();
        for id in [1, 2] {
            assert_eq!(provider.ask(PS, id, 1, None), [dead(id)]);
            let text = refused(&provider.ask(PS, 10 + id, 2, fitting_sink()), PS, 10 + id, Code::Aborted);
            assert_eq!(text, "the loss is NaN");
        }
        let left = (readers - 1) as usize;
        assert_eq!(provider.provider.held(), OfferCounts { offers: 2 * left, bytes: 0, requests: 0 });
    }
}

#[test]
fn a_failed_write_leaves_the_tensor_for_another_request() {
    let mut provider = provider();
    provider.offer("loss", 1, 1);
    provider.ask(PS, 1, 1, fitting_sink());
    let actions = provider.provider.write_failed((PS, RequestId(1)), "no memory", provider.now);
    assert!(refused(&actions, PS, 1, Code::Internal).contains("no memory"));
    assert_eq!(provider.ask(PS, 2, 1, fitting_sink()), [write(PS, 2, &[2, 3])]);
}

#[test]
fn requests_have_deadlines() {
    let mut provider = provider();
    provider.ask(PS, 1, 1, None);
    assert_eq!(provider.pass(TIMEOUT / 2), []);
    // A request that waits for a sink has a new deadline.
    provider.offer("gain", 1, 1);
    assert_eq!(provider.ask_for(PS, 2, "gain", 1, None), [metadata_to(PS, 2, &[2, 3])]);
    let text = refused(&provider.pass(TIMEOUT / 2), PS, 1, Code::DeadlineExceeded);
    assert!(text.contains("\"loss\" of step 1 was not offered"), "{text}");
    let text = refused(&provider.pass(TIMEOUT / 2), PS, 2, Code::DeadlineExceeded);
    assert!(text.contains("no sink"), "{text}");
    // The peer asked again before it learnt of the deadline. It has its answer already.
    assert_eq!(provider.ask_for(PS, 2, "gain", 1, fitting_sink()), []);
    assert_eq!(provider.ask_for(OTHER, 1, "gain", 1, fitting_sink()), [write(OTHER, 1, &[2, 3])]);
    assert_eq!(provider.pass(20 * TIMEOUT), [], "a write has no deadline");
    assert_eq!(provider.written(OTHER, 1), []);
    assert!(provider.provider.is_idle());
}

#[test]
fn an_offer_without_readers_expires() {
    let mut provider = provider();
    provider.offer("loss", 1, 3);
    assert_eq!(provider.ask(PS, 1, 1, fitting_sink()), [write(PS, 1, &[2, 3])]);
    let expired = ProviderAction::Expired { name: "loss".into(), step: 1, readers: 2 };
    assert_eq!(provider.pass(10 * TIMEOUT), [expired]);
    assert_eq!(provider.ask(OTHER, 1, 1, fitting_sink()), [], "the request comes too late");
    assert_eq!(provider.provider.held().bytes, 24, "still being written");
    assert_eq!(provider.provider.write_failed((PS, RequestId(1)), "no", provider.now).len(), 1);
    assert_eq!(provider.provider.held().bytes, 0, "a returned share of an expired offer is dropped");
    refused(&provider.pass(TIMEOUT), OTHER, 1, Code::DeadlineExceeded);
    assert!(provider.provider.is_idle());
}
