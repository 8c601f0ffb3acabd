//! Transcripts of a provider: what comes in, what goes out.

use tonic::Code;

use super::*;
use crate::wire::tensor_frame::{FrameError, MAX_NAME, RequestFault};
use crate::wire::tensor_metadata::MetadataError;

const PS: PeerId = PeerId(1);
const OTHER: PeerId = PeerId(2);
const TIMEOUT: Duration = Duration::from_secs(60);

type Action = ProviderAction<&'static str>;

/// A provider, and the time.
struct Provider {
    provider: super::Provider<&'static str>,
    now: Instant,
}

fn provider() -> Provider {
    provider_with(ProviderSettings::default())
}

fn provider_with(settings: ProviderSettings) -> Provider {
    Provider { provider: super::Provider::new(settings), now: Instant::now() }
}

impl Provider {
    fn offer(&mut self, name: &str, step: u64, readers: u32) -> Vec<Action> {
        self.try_offer(name, step, OfferedTensor::Tensor("tensor", metadata(&[2, 3])), readers).unwrap()
    }

    fn try_offer(
        &mut self,
        name: &str,
        step: u64,
        offer: OfferedTensor<&'static str>,
        readers: u32,
    ) -> Result<Vec<Action>, OfferError> {
        self.provider.offer(name, step, offer, readers, self.now)
    }

    fn ask(&mut self, peer: PeerId, id: u64, step: u64, sink: Option<Sink>) -> Vec<Action> {
        self.ask_for(peer, id, "loss", step, sink)
    }

    fn ask_for(&mut self, peer: PeerId, id: u64, name: &str, step: u64, sink: Option<Sink>) -> Vec<Action> {
        let request = TensorRequest { request_id: RequestId(id), step, sink, checksum_wanted: false, name };
        self.provider.handle_request(peer, &request, self.now)
    }

    fn cancel(&mut self, peer: PeerId, id: u64) -> Vec<Action> {
        self.provider.handle_cancel(peer, RequestId(id), self.now)
    }

    fn written(&mut self, peer: PeerId, id: u64) -> Vec<Action> {
        self.provider.written(peer, RequestId(id), None, self.now)
    }

    fn pass(&mut self, time: Duration) -> Vec<Action> {
        self.now += time;
        self.provider.handle_timeout(self.now)
    }
}

fn write(peer: PeerId, id: u64, lengths: &[u64]) -> Action {
    let sink = sink(metadata(lengths));
    ProviderAction::Write { peer, request_id: RequestId(id), tensor: "tensor", sink, checksum_wanted: false }
}

fn tell(peer: PeerId, id: u64, lengths: &[u64]) -> Action {
    let message = Message::Metadata { request_id: RequestId(id), metadata: metadata(lengths) };
    ProviderAction::Send { peer, message }
}

fn done(peer: PeerId, id: u64) -> Action {
    ProviderAction::Send { peer, message: Message::Written { request_id: RequestId(id), checksum: None } }
}

/// The one action is a status with this code for this request. Gives its text.
#[track_caller]
fn refused(actions: &[Action], to: PeerId, id: u64, expected: Code) -> String {
    match actions {
        [ProviderAction::Send { peer, message: Message::Status { request_id, failure } }] => {
            assert_eq!((*peer, *request_id, failure.code), (to, RequestId(id), expected), "{failure}");
            failure.text.clone()
        }
        other => panic!("{other:?}"),
    }
}

fn here() -> Option<Sink> {
    Some(sink(metadata(&[2, 3])))
}

#[test]
fn a_request_is_matched_whether_it_or_the_tensor_comes_first() {
    let mut tensor_first = provider();
    assert_eq!(tensor_first.offer("loss", 1, 1), []);
    assert_eq!(tensor_first.ask(PS, 1, 1, here()), [write(PS, 1, &[2, 3])]);
    assert_eq!(tensor_first.written(PS, 1), [done(PS, 1)]);

    let mut request_first = provider();
    assert_eq!(request_first.ask(PS, 1, 1, here()), []);
    assert_eq!(request_first.offer("loss", 2, 1), [], "another step");
    assert_eq!(request_first.offer("gain", 1, 1), [], "another name");
    assert_eq!(request_first.offer("loss", 1, 1), [write(PS, 1, &[2, 3])]);
    assert_eq!(request_first.written(PS, 1), [done(PS, 1)]);

    assert!(tensor_first.provider.is_idle());
    assert_eq!(request_first.provider.held(), Held { offers: 2, bytes: 48, requests: 0 });
}

#[test]
fn who_does_not_know_what_it_is_is_told_and_asks_again() {
    let mut provider = provider();
    provider.offer("loss", 1, 1);
    assert_eq!(provider.ask(PS, 1, 1, None), [tell(PS, 1, &[2, 3])]);
    assert_eq!(provider.ask(PS, 1, 1, here()), [write(PS, 1, &[2, 3])]);
    assert_eq!(provider.written(PS, 1), [done(PS, 1)]);
    assert!(provider.provider.is_idle());

    provider.offer("loss", 2, 1);
    let old_shape = Some(sink(metadata(&[3, 3])));
    assert_eq!(provider.ask(PS, 2, 2, old_shape), [tell(PS, 2, &[2, 3])]);
    assert_eq!(provider.ask(PS, 2, 2, here()), [write(PS, 2, &[2, 3])]);
}

#[test]
fn a_tensor_that_was_told_of_is_kept_for_who_was_told() {
    let mut provider = provider();
    provider.ask(PS, 1, 1, None);
    provider.ask(OTHER, 9, 1, here());
    assert_eq!(provider.offer("loss", 1, 1), [tell(PS, 1, &[2, 3])]);
    assert_eq!(provider.cancel(PS, 7), [], "no such request");
    let again = provider.cancel(PS, 1);
    assert_eq!(again[1..], [write(OTHER, 9, &[2, 3])], "given back, it is for the next");
    refused(&again[..1], PS, 1, Code::Cancelled);
    assert_eq!(provider.written(OTHER, 9), [done(OTHER, 9)]);
    assert!(provider.provider.is_idle());
}

#[test]
fn a_tensor_of_no_bytes_is_there_at_once() {
    let mut provider = provider();
    let nothing = metadata(&[0, 3]);
    provider.try_offer("loss", 1, OfferedTensor::Tensor("tensor", nothing), 1).unwrap();
    let request = TensorRequest {
        request_id: RequestId(1),
        step: 1,
        sink: Some(sink(nothing)),
        checksum_wanted: true,
        name: "loss",
    };
    let actions = provider.provider.handle_request(PS, &request, provider.now);
    let message = Message::Written { request_id: RequestId(1), checksum: Some(checksum(&[])) };
    assert_eq!(actions, [ProviderAction::Send { peer: PS, message }]);
    assert!(provider.provider.is_idle());
}

#[test]
fn a_checksum_comes_if_it_was_wanted() {
    for (wanted, computed, expected) in
        [(true, Some(5), Some(Some(5))), (false, Some(5), Some(None)), (true, None, None)]
    {
        let mut provider = provider();
        provider.offer("loss", 1, 1);
        let request = TensorRequest {
            request_id: RequestId(1),
            step: 1,
            sink: here(),
            checksum_wanted: wanted,
            name: "loss",
        };
        provider.provider.handle_request(PS, &request, provider.now);
        let actions = provider.provider.written(PS, RequestId(1), computed, provider.now);
        match expected {
            None => drop(refused(&actions, PS, 1, Code::Internal)),
            Some(checksum) => {
                let message = Message::Written { request_id: RequestId(1), checksum };
                assert_eq!(actions, [ProviderAction::Send { peer: PS, message }]);
            }
        }
    }
}

#[test]
fn dead_and_failed_tensors_are_told_to_each_reader() {
    let mut provider = provider();
    provider.ask(PS, 1, 1, None);
    let dead = |peer, id| ProviderAction::Send { peer, message: Message::Dead { request_id: RequestId(id) } };
    assert_eq!(provider.try_offer("loss", 1, OfferedTensor::Dead, 2), Ok(vec![dead(PS, 1)]));
    assert_eq!(provider.ask(OTHER, 5, 1, here()), [dead(OTHER, 5)]);
    let failed = OfferedTensor::Failed(Failure::new(Code::Aborted, "the loss is NaN"));
    provider.try_offer("loss", 2, failed, 1).unwrap();
    assert_eq!(refused(&provider.ask(PS, 2, 2, here()), PS, 2, Code::Aborted), "the loss is NaN");
    assert!(provider.provider.is_idle());
}

#[test]
fn nothing_is_delivered_twice() {
    let mut provider = provider();
    provider.ask(PS, 1, 1, None);
    let pending = refused(&provider.ask(PS, 2, 1, None), PS, 2, Code::AlreadyExists);
    assert!(pending.contains("\"loss\" of step 1") && pending.contains("pending"), "{pending}");
    provider.offer("loss", 1, 3);
    provider.ask(PS, 1, 1, here());
    assert_eq!(provider.written(PS, 1), [done(PS, 1)]);
    let delivered = refused(&provider.ask(PS, 3, 1, here()), PS, 3, Code::AlreadyExists);
    assert!(delivered.contains("delivered"), "{delivered}");
    refused(&provider.ask(PS, 1, 9, here()), PS, 1, Code::AlreadyExists);
    assert_eq!(provider.ask(OTHER, 1, 1, here()), [write(OTHER, 1, &[2, 3])], "others may");
}

#[test]
fn a_number_that_is_used_twice_ends_the_request_that_has_it() {
    let mut provider = provider();
    provider.ask(PS, 1, 1, here());
    refused(&provider.ask_for(PS, 1, "gain", 5, here()), PS, 1, Code::AlreadyExists);
    assert_eq!(provider.offer("loss", 1, 1), [], "nobody waits for it any more");

    assert_eq!(provider.ask(OTHER, 1, 1, here()), [write(OTHER, 1, &[2, 3])]);
    refused(&provider.ask(OTHER, 1, 1, here()), OTHER, 1, Code::AlreadyExists);
    refused(&provider.ask(OTHER, 1, 2, here()), OTHER, 1, Code::AlreadyExists);
    assert_eq!(provider.provider.held().offers, 1, "it is still being written");
    assert_eq!(provider.written(OTHER, 1), [], "the answer was given");
    assert!(provider.provider.is_idle());
}

#[test]
fn a_sink_that_does_not_fit_is_refused() {
    let good = sink(metadata(&[2, 3]));
    let cases = [
        (Sink { length: 23, ..good }, "23 bytes for a tensor of 24"),
        (Sink { address: u64::MAX - 22, ..good }, "beyond all addresses"),
    ];
    for (bad, expected) in cases {
        let mut provider = provider();
        provider.offer("loss", 1, 1);
        let first = refused(&provider.ask(PS, 1, 1, Some(bad)), PS, 1, Code::InvalidArgument);
        assert!(first.contains(expected), "{first}");
        provider.ask(PS, 2, 1, None);
        let again = refused(&provider.ask(PS, 2, 1, Some(bad)), PS, 2, Code::InvalidArgument);
        assert!(again.contains(expected), "{again}");
        assert_eq!(provider.ask(PS, 3, 1, here()), [write(PS, 3, &[2, 3])], "the tensor is still there");
    }
}

#[test]
fn asking_again_is_for_the_same_tensor_with_a_sink_for_it() {
    let other_type = WireMetadata { dtype: 12, ..metadata(&[2, 3]) };
    let cases = [
        ("loss", 1, None, "without a sink"),
        ("loss", 2, here(), "for another"),
        ("gain", 1, here(), "for another"),
        ("loss", 1, Some(sink(metadata(&[3, 2]))), "not made for"),
        ("loss", 1, Some(sink(other_type)), "not made for"),
    ];
    for (name, step, sink, expected) in cases {
        let mut provider = provider();
        provider.offer("loss", 1, 1);
        assert_eq!(provider.ask(PS, 1, 1, None), [tell(PS, 1, &[2, 3])]);
        let text = refused(&provider.ask_for(PS, 1, name, step, sink), PS, 1, Code::InvalidArgument);
        assert!(text.contains(expected), "{text}");
        assert_eq!(provider.ask(OTHER, 1, 1, here()), [write(OTHER, 1, &[2, 3])], "others are not touched");
    }
}

#[test]
fn names_and_malformed_requests_are_refused() {
    let mut provider = provider();
    let text =
        refused(&provider.ask_for(PS, 1, &"n".repeat(MAX_NAME + 1), 1, None), PS, 1, Code::InvalidArgument);
    assert!(text.contains("1025") && text.contains("1024"), "{text}");
    refused(&provider.ask_for(PS, 2, "", 1, None), PS, 2, Code::InvalidArgument);
    let (request_id, fault) = (RequestId(3), RequestFault::Metadata(MetadataError::Rank(200)));
    let error = FrameError::Request { request_id, fault };
    let text = refused(
        &provider.provider.handle_malformed(PS, request_id, &error, provider.now),
        PS,
        3,
        Code::InvalidArgument,
    );
    assert!(text.contains("200"), "{text}");
    refused(&provider.ask(PS, 3, 1, None), PS, 3, Code::AlreadyExists);
    assert!(provider.provider.is_idle());
}

#[test]
fn a_peer_has_as_many_requests_as_it_may() {
    let mut provider =
        provider_with(ProviderSettings { max_requests_per_peer: 2, ..ProviderSettings::default() });
    provider.ask(PS, 1, 1, None);
    provider.ask(PS, 2, 2, None);
    refused(&provider.ask(PS, 3, 3, None), PS, 3, Code::ResourceExhausted);
    assert_eq!(provider.ask(OTHER, 3, 3, None), [], "others are not touched");
    refused(&provider.cancel(PS, 1), PS, 1, Code::Cancelled);
    assert_eq!(provider.ask(PS, 4, 3, None), []);
}

#[test]
fn offers_are_bounded() {
    let settings = ProviderSettings { max_offers: 2, max_bytes: 30, ..ProviderSettings::default() };
    let mut provider = provider_with(settings);
    let tensor = |lengths: &[u64]| OfferedTensor::Tensor("tensor", metadata(lengths));
    let (name, step) = ("loss".to_owned(), 1);
    let cases = [
        ("", tensor(&[1]), 1, OfferError::Name { length: 0 }),
        ("loss", tensor(&[1]), 0, OfferError::NoReaders { name: name.clone(), step }),
        ("loss", tensor(&[8]), 1, OfferError::TooMuch { bytes: 32, kept: 0, limit: 30 }),
        (
            "loss",
            OfferedTensor::Failed(Failure::new(Code::Ok, "")),
            1,
            OfferError::NoFailure { name: name.clone(), step },
        ),
    ];
    for (name, offer, readers, expected) in cases {
        assert_eq!(provider.try_offer(name, 1, offer, readers), Err(expected));
    }
    assert!(provider.provider.is_idle());
    provider.try_offer("loss", 1, tensor(&[2]), 1).unwrap();
    assert_eq!(
        provider.try_offer("loss", 1, OfferedTensor::Dead, 1),
        Err(OfferError::AlreadyOffered { name: name.clone(), step })
    );
    let endless = WireMetadata { bytes: u64::MAX, ..metadata(&[1]) };
    assert!(matches!(
        provider.try_offer("loss", 2, OfferedTensor::Tensor("tensor", endless), 1),
        Err(OfferError::TooMuch { kept: 8, .. })
    ));
    provider.try_offer("loss", 2, tensor(&[5]), 1).unwrap();
    let error = provider.try_offer("loss", 3, OfferedTensor::Dead, 1).unwrap_err();
    assert_eq!(error, OfferError::TooMany { kept: 2 });
    assert_eq!(tonic::Status::from(error).code(), Code::ResourceExhausted);
    assert_eq!(provider.provider.withdraw("loss", 1), Some(1));
    assert_eq!(provider.provider.withdraw("loss", 1), None);
    assert_eq!(provider.try_offer("loss", 3, OfferedTensor::Dead, 1), Ok(vec![]));
}

#[test]
fn what_a_peer_that_is_gone_did_not_get_is_for_others() {
    let mut provider = provider();
    for (step, sink) in [(1, here()), (2, None), (3, here())] {
        provider.ask(PS, step, step, sink);
    }
    provider.ask(OTHER, 7, 1, here());
    assert_eq!(provider.offer("loss", 1, 1), [write(PS, 1, &[2, 3])]);
    assert_eq!(provider.offer("loss", 2, 1), [tell(PS, 2, &[2, 3])]);
    assert_eq!(provider.provider.peer_gone(PS, provider.now), [write(OTHER, 7, &[2, 3])]);
    assert_eq!(provider.written(PS, 1), [], "the device's last word");
    assert_eq!(provider.written(OTHER, 7), [done(OTHER, 7)]);
    assert_eq!(provider.ask(OTHER, 8, 2, here()), [write(OTHER, 8, &[2, 3])]);
    assert_eq!(provider.written(OTHER, 8), [done(OTHER, 8)]);
    assert!(provider.provider.is_idle());
}

#[test]
fn a_write_that_failed_leaves_the_tensor_for_another_try() {
    let mut provider = provider();
    provider.offer("loss", 1, 1);
    provider.ask(PS, 1, 1, here());
    let actions = provider.provider.write_failed(PS, RequestId(1), "no memory", provider.now);
    assert!(refused(&actions, PS, 1, Code::Internal).contains("no memory"));
    assert_eq!(provider.ask(PS, 2, 1, here()), [write(PS, 2, &[2, 3])]);
}

#[test]
fn who_waits_for_too_long_is_told() {
    let mut provider = provider();
    assert_eq!(provider.provider.poll_timeout(), None);
    provider.ask(PS, 1, 1, None);
    assert_eq!(provider.provider.poll_timeout(), Some(provider.now + TIMEOUT));
    assert_eq!(provider.pass(TIMEOUT / 2), []);
    // What waits for a sink has its own time.
    provider.offer("gain", 1, 1);
    assert_eq!(provider.ask_for(PS, 2, "gain", 1, None), [tell(PS, 2, &[2, 3])]);
    let text = refused(&provider.pass(TIMEOUT / 2), PS, 1, Code::DeadlineExceeded);
    assert!(text.contains("\"loss\" of step 1 was not offered"), "{text}");
    let text = refused(&provider.pass(TIMEOUT / 2), PS, 2, Code::DeadlineExceeded);
    assert!(text.contains("no sink"), "{text}");
    // The peer asked again before it knew: it has its answer.
    assert_eq!(provider.ask_for(PS, 2, "gain", 1, here()), []);
    assert_eq!(provider.ask_for(OTHER, 1, "gain", 1, here()), [write(OTHER, 1, &[2, 3])]);
    assert_eq!(provider.pass(20 * TIMEOUT), [], "the device takes its time");
    assert_eq!(provider.written(OTHER, 1), [done(OTHER, 1)]);
    assert!(provider.provider.is_idle());
}

#[test]
fn an_offer_that_nobody_comes_for_is_let_go() {
    let mut provider = provider();
    provider.offer("loss", 1, 3);
    assert_eq!(provider.ask(PS, 1, 1, here()), [write(PS, 1, &[2, 3])]);
    let expired = ProviderAction::Expired { name: "loss".into(), step: 1, readers: 2 };
    assert_eq!(provider.pass(10 * TIMEOUT), [expired]);
    assert_eq!(provider.ask(OTHER, 1, 1, here()), [], "it comes too late");
    assert_eq!(provider.provider.held().bytes, 24, "still being written");
    assert_eq!(provider.provider.write_failed(PS, RequestId(1), "no", provider.now).len(), 1);
    assert_eq!(provider.provider.held().bytes, 0, "a share that is given back is for nobody");
    refused(&provider.pass(TIMEOUT), OTHER, 1, Code::DeadlineExceeded);
    assert!(provider.provider.is_idle());
}
