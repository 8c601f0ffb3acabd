//! Hostile peers: nothing panics, the bounds hold, and other peers are not affected.

use super::world::Random;
use super::*;

const HOSTILE: PeerId = PeerId(66);
const HONEST: PeerId = PeerId(1);
const STEPS: u64 = 4;

fn any_metadata(random: &mut Random) -> WireMetadata {
    let bytes = [8, 8, 8, 0, u64::MAX][random.below(5) as usize];
    WireMetadata { bytes, dtype: 10 + random.below(2) as u16, ..metadata(&[2]) }
}

/// Returns a random request, valid or not.
fn any_request(random: &mut Random) -> TensorRequest<'static> {
    let metadata = any_metadata(random);
    let (address, length) = (random.below(2) * (u64::MAX - 9), random.below(12));
    let start = RemoteSegment { address, rkey: Rkey(random.below(3) as u32) };
    let sink = TensorMemory { metadata, place: RemoteRange { start, length } };
    TensorRequest {
        request_id: RequestId(random.below(8)),
        step: random.below(STEPS + 1),
        sink: random.chance(70).then_some(sink),
        checksum_wanted: random.chance(30),
        name: ["loss", "gain", ""][random.below(3) as usize].into(),
    }
}

/// Checks that another peer gets its share of each offer at any time, and that the hostile peer gets no more
/// than its own share.
#[test]
fn a_hostile_requester_does_not_affect_other_peers() {
    for seed in 0..3_000 {
        let mut random = Random::new(seed);
        // A provider that forgets a peer's requests does not give the peer another share.
        let max_remembered = random.below(3) as usize;
        let settings =
            ProviderSettings { max_requests_per_peer: 4, max_remembered, ..ProviderSettings::default() };
        let (mut provider, now) = (Provider::new(settings), Instant::now());
        for step in 0..STEPS {
            abuse(&mut provider, &mut random, now);
            let mut actions = Vec::new();
            let asks_first = random.chance(50);
            if asks_first {
                actions.extend(ask(&mut provider, step, now));
            }
            let offer = OfferedTensor::Tensor(step, metadata(&[2]));
            actions.extend(provider.offer("loss", step, offer, 2, now).unwrap());
            abuse(&mut provider, &mut random, now);
            if !asks_first {
                actions.extend(ask(&mut provider, step, now));
            }
            let write = |action: &&ProviderAction<u64>| {
                matches!(action, ProviderAction::Write { reader: (HONEST, _), .. })
            };
            assert_eq!(actions.iter().filter(write).count(), 1, "seed {seed}: {actions:?}");
            assert_eq!(provider.written((HONEST, RequestId(step)), now), [], "seed {seed}");
        }
        provider.peer_gone(HOSTILE, now);
        for step in 0..STEPS {
            provider.withdraw("loss", step);
        }
        assert!(provider.is_idle(), "seed {seed}");
    }
}

fn ask(provider: &mut Provider<u64>, step: u64, now: Instant) -> Vec<ProviderAction<u64>> {
    let (request_id, sink) = (RequestId(step), Some(sink(metadata(&[2]))));
    let request = TensorRequest { request_id, step, sink, checksum_wanted: false, name: "loss".into() };
    provider.handle_request(HONEST, &request, now)
}

fn abuse(provider: &mut Provider<u64>, random: &mut Random, now: Instant) {
    for _ in 0..random.below(40) {
        let request_id = RequestId(random.below(8));
        let actions = match random.below(7) {
            0 => provider.handle_cancel((HOSTILE, request_id), now),
            1 => provider.written((HOSTILE, request_id), now),
            2 => provider.write_failed((HOSTILE, request_id), "flushed", now),
            _ => provider.handle_request(HOSTILE, &any_request(random), now),
        };
        for action in &actions {
            if let ProviderAction::Write { sink, .. } = action {
                assert!(
                    sink.place.length >= sink.metadata.bytes && sink.metadata == metadata(&[2]),
                    "{sink:?}"
                );
            }
        }
        assert!(actions.len() <= 3 && provider.held().requests <= 5, "{actions:?}, {:?}", provider.held());
    }
}

/// Checks that with any answers of a peer each request gets one result, each sink is freed once, and no
/// unwritten tensor arrives.
#[test]
fn each_request_gets_one_result_from_a_hostile_provider() {
    let mut violations = 0;
    for seed in 0..3_000 {
        let mut random = Random::new(seed);
        let mut requester =
            Requester::new(RequesterSettings { max_cached: 1, ..RequesterSettings::default() });
        let mut log = Log::default();
        for _ in 0..random.below(60) {
            let request_id = RequestId(random.below(6));
            let answer = match random.below(9) {
                0 | 1 => requester.request(["loss", "gain"][random.below(2) as usize], 1).map_or_else(
                    |_| Ok(Vec::new()),
                    |(_, action)| {
                        log.asked += 1;
                        Ok(vec![action])
                    },
                ),
                2 => Ok(log.allocate(&mut requester)),
                3 => {
                    log.cancelled(request_id);
                    Ok(requester.cancel(request_id))
                }
                4 => requester.handle_metadata(request_id, any_metadata(&mut random)),
                5 => requester.handle_written(request_id, random.chance(5).then_some(1)),
                6 => {
                    requester.handle_announced([request_id.0 as u32, u32::MAX >> 1][random.below(2) as usize])
                }
                7 => requester.handle_status(request_id, random.below(20) as u32, "no"),
                _ => requester.handle_dead(request_id),
            };
            match answer {
                Ok(actions) => log.follow(actions),
                Err(_) if random.chance(90) => violations += 1,
                Err(violation) => {
                    log.follow(requester.peer_gone(&violation.to_string()));
                    assert_eq!(requester.pending(), 0);
                }
            }
        }
        log.follow(requester.peer_gone("the end"));
        assert_eq!(requester.pending(), 0, "seed {seed}");
        assert_eq!(log.sinks, 0, "seed {seed}: sinks that were not freed");
        for id in 0..log.asked {
            let results = log.results.iter().filter(|result| **result == RequestId(id)).count();
            let cancelled = log.cancelled.contains(&RequestId(id));
            assert!(
                results == 1 || results == 0 && cancelled,
                "seed {seed}, request {id}: {results} results"
            );
        }
    }
    assert!(violations > 1_000, "the peers are hostile");
}

/// A sink without content.
#[derive(Debug)]
struct EmptySink;

#[derive(Default)]
struct Log {
    asked: u64,
    sinks: usize,
    allocations: Vec<(RequestId, WireMetadata)>,
    cancelled: Vec<RequestId>,
    results: Vec<RequestId>,
}

impl Log {
    fn allocate(&mut self, requester: &mut Requester<EmptySink>) -> Vec<RequesterAction<EmptySink>> {
        let Some((request_id, metadata)) = self.allocations.pop() else { return Vec::new() };
        self.sinks += 1;
        requester.sink_ready(request_id, EmptySink, place(metadata.bytes))
    }

    /// Notes a cancellation, which has no effect on a request with a result.
    fn cancelled(&mut self, request_id: RequestId) {
        if request_id.0 < self.asked && !self.results.contains(&request_id) {
            self.cancelled.push(request_id);
        }
    }

    fn follow(&mut self, actions: Vec<RequesterAction<EmptySink>>) {
        for action in actions {
            match action {
                RequesterAction::Send(..) => {}
                RequesterAction::Allocate { request_id, metadata } => {
                    assert!(metadata.bytes <= RequesterSettings::default().max_tensor_bytes);
                    self.allocations.push((request_id, metadata));
                }
                RequesterAction::Free(EmptySink) => self.sinks -= 1,
                RequesterAction::Finished { request_id, result } => {
                    if let RequestOutcome::Arrived(Arrival { sink: EmptySink, .. }) = result {
                        self.sinks -= 1;
                    }
                    assert!(!self.cancelled.contains(&request_id), "a result for a cancelled request");
                    self.results.push(request_id);
                }
            }
        }
    }
}
