//! A provider and its peers over queues in memory: frames are bytes, writes stay in order with them and complete
//! later, and a write without a grant is an error.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::*;
use crate::wire::tensor_frame::{Announcement, Decoded, MAX_FRAME};

/// A generator of pseudo-random numbers. Equal seeds give equal numbers.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bd1_e995)
    }

    /// Returns a number below `bound`, which is not 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// A handle of a tensor.
pub(super) type Handle = Arc<Vec<u8>>;

/// A sink: the address of the peer's memory.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SinkAddress(u64);

/// A request and its result.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) name: &'static str,
    pub(super) step: u64,
    /// Whether this peer asks for this tensor more than once, without having given up before. The order at
    /// the provider is open, because some requests wait for a sink.
    pub(super) repeated: bool,
    pub(super) cancelled: bool,
    pub(super) result: Option<Received>,
    /// The tensor of the result, until the program takes it.
    untaken: Option<Arrival<SinkAddress>>,
}

/// The result of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    Tensor(WireMetadata, Vec<u8>),
    Dead,
    Failed(Failure),
}

pub(super) struct Peer {
    pub(super) id: PeerId,
    pub(super) requester: Requester<SinkAddress>,
    pub(super) asked: HashMap<RequestId, Asked>,
    pub(super) alive: bool,
    /// Whether its process does nothing. Its earlier frames still arrive, and the device still writes its
    /// memory.
    pub(super) hangs: bool,
    /// Requests for which there was no memory.
    pub(super) without_memory: HashSet<RequestId>,
    /// Memory that the provider may write, by address.
    granted: HashMap<u64, Vec<u8>>,
    next_address: u64,
    allocations: Vec<(RequestId, WireMetadata)>,
    to_provider: VecDeque<Vec<u8>>,
    /// What the provider's device does next at this peer.
    wire: VecDeque<Posted>,
    /// What the device has brought.
    to_requester: VecDeque<Brought>,
}

/// A request that the provider has posted.
enum Posted {
    Frame(Vec<u8>),
    Write { request_id: RequestId, tensor: Handle, sink: TensorMemory, announced: bool },
}

/// A receive that has completed.
enum Brought {
    Frame(Vec<u8>),
    Immediate(u32),
}

/// The wait of an accepted request, from the view of its peer.
#[derive(Debug)]
struct RequestWait {
    since: Instant,
    /// Whether the request waits for a sink. Otherwise the request waits for an offer.
    for_sink: bool,
}

pub(super) struct World {
    pub(super) provider: Provider<Handle>,
    pub(super) peers: Vec<Peer>,
    pub(super) now: Instant,
    pub(super) expired: u32,
    settings: ProviderSettings,
    /// Requests that wait.
    waits: HashMap<Reader, RequestWait>,
    /// Requests with a last answer.
    answered: HashSet<Reader>,
    /// Requests whose deadline has passed.
    pub(super) overdue: HashSet<Reader>,
    /// Requests whose write has failed.
    pub(super) unwritten: HashSet<Reader>,
    /// Time of each offer, and its number of readers.
    offered: HashMap<(String, u64), (Instant, u32)>,
    /// Writes that are done, and whose completion the provider has not polled.
    done: Vec<Reader>,
    /// The probability of a write that can't begin, in percent.
    pub(super) write_fails: u64,
    random: Random,
    next_peer: u64,
    validate: bool,
}

impl World {
    pub(super) fn new(settings: ProviderSettings, peers: u64, validate: bool, random: Random) -> Self {
        let (provider, now) = (Provider::new(settings), Instant::now());
        let mut world = Self {
            provider,
            peers: Vec::new(),
            now,
            expired: 0,
            settings,
            waits: HashMap::new(),
            answered: HashSet::new(),
            overdue: HashSet::new(),
            unwritten: HashSet::new(),
            offered: HashMap::new(),
            done: Vec::new(),
            write_fails: 0,
            random,
            next_peer: 0,
            validate,
        };
        for _ in 0..peers {
            let peer = world.connect();
            world.peers.push(peer);
        }
        world
    }

    /// Makes a peer on a new link.
    fn connect(&mut self) -> Peer {
        self.next_peer += 1;
        let settings =
            RequesterSettings { validate: self.validate, max_cached: 3, ..RequesterSettings::default() };
        Peer {
            id: PeerId(self.next_peer),
            requester: Requester::new(settings),
            asked: HashMap::new(),
            alive: true,
            hangs: false,
            without_memory: HashSet::new(),
            granted: HashMap::new(),
            next_address: 4096,
            allocations: Vec::new(),
            to_provider: VecDeque::new(),
            wire: VecDeque::new(),
            to_requester: VecDeque::new(),
        }
    }

    pub(super) fn offer(&mut self, name: &str, step: u64, offer: OfferedTensor<Handle>, readers: u32) {
        let actions = self.provider.offer(name, step, offer, readers, self.now);
        self.offered.insert((name.to_owned(), step), (self.now, readers));
        self.follow(actions.unwrap());
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now += time;
        let actions = self.provider.handle_timeout(self.now);
        self.follow(actions);
        if let Some(timeout) = self.settings.request_timeout {
            let late = self.waits.iter().find(|(_, wait)| self.now - wait.since >= timeout);
            assert!(late.is_none(), "{late:?} waits for longer than it may");
        }
    }

    /// Gives the provider the next frame of a peer.
    pub(super) fn serve(&mut self, peer: usize) -> bool {
        let (id, now) = (self.peers[peer].id, self.now);
        let Some(bytes) = self.peers[peer].to_provider.pop_front() else { return false };
        let Decoded { frame, .. } = Frame::decode(&bytes).unwrap();
        let actions = match frame {
            Frame::Request(request) => {
                let reader = (id, request.request_id);
                if !self.answered.contains(&reader) {
                    self.waits.entry(reader).or_insert(RequestWait { since: now, for_sink: false });
                }
                self.provider.handle_request(id, &request, now)
            }
            Frame::Cancel { request_id } => self.provider.handle_cancel((id, request_id), now),
            other => panic!("{other:?} to the provider"),
        };
        self.follow(actions);
        true
    }

    /// Lets the provider poll the completion of a random write.
    pub(super) fn complete_write(&mut self, random: &mut Random) -> bool {
        if self.done.is_empty() {
            return false;
        }
        let at = random.below(self.done.len() as u64) as usize;
        let reader = self.done.swap_remove(at);
        let actions = self.provider.written(reader, self.now);
        self.follow(actions);
        true
    }

    /// Lets the device carry out what was posted first for a peer, also if the peer's process hangs.
    pub(super) fn carry(&mut self, peer: usize) -> bool {
        let peer = &mut self.peers[peer];
        match peer.wire.pop_front() {
            None => return false,
            Some(Posted::Frame(bytes)) => peer.to_requester.push_back(Brought::Frame(bytes)),
            Some(Posted::Write { request_id, tensor, sink, announced }) => {
                peer.write(&sink, &tensor);
                if announced {
                    let immediate = Announcement::of(request_id).encode();
                    peer.to_requester.push_back(Brought::Immediate(immediate));
                }
                self.done.push((peer.id, request_id));
            }
        }
        true
    }

    /// Ends a peer, and puts a new one in its place.
    pub(super) fn die(&mut self, peer: usize) -> Peer {
        let new = self.connect();
        let mut dead = std::mem::replace(&mut self.peers[peer], new);
        dead.alive = false;
        // Its queue pair is gone, so what was posted is flushed.
        dead.wire.clear();
        self.waits.retain(|(peer, _), _| *peer != dead.id);
        let actions = self.provider.peer_gone(dead.id, self.now);
        self.follow(actions);
        let actions = dead.requester.peer_gone("it died");
        dead.follow(actions);
        dead.take();
        dead
    }

    /// Handles all frames, writes and allocations in a random order, until none is left.
    pub(super) fn settle(&mut self, random: &mut Random) {
        let kinds = 1 + 4 * self.peers.len() as u64;
        loop {
            let start = random.below(kinds);
            let happened = (0..kinds).any(|index| match (start + index) % kinds {
                0 => self.complete_write(random),
                kind => {
                    let (peer, what) = ((kind - 1) as usize / 4, kind % 4);
                    match what {
                        0 => self.serve(peer),
                        1 => self.peers[peer].receive(),
                        2 => self.carry(peer),
                        _ => self.peers[peer].allocate(random, false),
                    }
                }
            });
            if !happened {
                return;
            }
        }
    }

    /// Checks that provider and peers hold nothing.
    pub(super) fn assert_nothing_left(&self) {
        self.assert_provider_keeps_nothing();
        self.peers.iter().for_each(Peer::assert_nothing_left);
    }

    pub(super) fn assert_provider_keeps_nothing(&self) {
        assert_eq!(self.provider.held(), OfferCounts::default());
        assert!(self.provider.is_idle());
        assert!(self.done.is_empty());
        assert!(self.waits.is_empty(), "no answer: {:?}", self.waits);
    }

    fn follow(&mut self, actions: Vec<ProviderAction<Handle>>) {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            match action {
                ProviderAction::Send { reader: (peer, request_id), frame } => {
                    self.check_answer(peer, request_id, &frame);
                    self.post(peer, Posted::Frame(encoded(&frame)));
                }
                ProviderAction::Write { reader: (peer, request_id), tensor, sink, checksum_wanted } => {
                    // From now on the request has no deadline, because it waits for the device.
                    self.waits.remove(&(peer, request_id)).expect("a write for a request that waits");
                    if self.random.chance(self.write_fails) {
                        self.unwritten.insert((peer, request_id));
                        let now = self.now;
                        actions.extend(self.provider.write_failed((peer, request_id), "no memory", now));
                        continue;
                    }
                    self.answered.insert((peer, request_id));
                    // Sometimes the peer has no receive for immediate data, or its device has none.
                    let announced = !checksum_wanted && self.random.chance(50);
                    let checksum = checksum_wanted.then(|| checksum(&tensor));
                    self.post(peer, Posted::Write { request_id, tensor, sink, announced });
                    if !announced {
                        let written = Frame::Written { request_id, checksum };
                        self.post(peer, Posted::Frame(encoded(&written)));
                    }
                }
                ProviderAction::Expired { name, step, readers } => {
                    let (since, all) = self.offered[&(name.to_string(), step)];
                    let timeout = self.settings.offer_timeout.expect("offers that expire");
                    assert!(self.now - since >= timeout, "{name:?} of step {step} expired early");
                    assert!((1..=all).contains(&readers), "{readers} of {all} readers did not come");
                    self.expired += readers;
                }
            }
        }
    }

    fn post(&mut self, peer: PeerId, posted: Posted) {
        let peer = self.peers.iter_mut().find(|end| end.id == peer);
        peer.expect("a message to a peer that is there").wire.push_back(posted);
    }

    /// Checks the time of an answer: a deadline error comes after its deadline only.
    fn check_answer(&mut self, peer: PeerId, request_id: RequestId, frame: &Frame<'_>) {
        if let Frame::Metadata { .. } = frame {
            let wait = self.waits.get_mut(&(peer, request_id)).expect("metadata for a request that waits");
            *wait = RequestWait { since: self.now, for_sink: true };
            return;
        }
        let wait = self.waits.remove(&(peer, request_id));
        self.answered.insert((peer, request_id));
        if let Frame::Status { code, text, .. } = frame
            && *code == tonic::Code::DeadlineExceeded as u32
        {
            let wait = wait.expect("a deadline of a request that waits");
            let timeout = self.settings.request_timeout.expect("requests that expire");
            let waited = self.now - wait.since;
            assert!(waited >= timeout, "{request_id} failed after {waited:?}: {text}");
            let what = if wait.for_sink { "no sink for" } else { "was not offered" };
            assert!(text.contains(what), "{text}, but it waited: {wait:?}");
            self.overdue.insert((peer, request_id));
        }
    }
}

impl Asked {
    /// Returns whether this is a request for this tensor that was not given up.
    pub(super) fn is_for(&self, name: &str, step: u64) -> bool {
        (self.name, self.step) == (name, step) && !self.cancelled
    }
}

impl Peer {
    pub(super) fn ask(&mut self, name: &'static str, step: u64) {
        let mut repeated = false;
        for same in self.asked.values_mut().filter(|asked| asked.is_for(name, step)) {
            (same.repeated, repeated) = (true, true);
        }
        let (request_id, action) = self.requester.request(name, step).unwrap();
        let asked = Asked { name, step, repeated, cancelled: false, result: None, untaken: None };
        assert!(self.asked.insert(request_id, asked).is_none(), "a number used twice");
        self.follow(vec![action]);
    }

    /// Cancels a request, which may have a result that the program has not taken.
    pub(super) fn cancel(&mut self, request_id: RequestId) {
        let asked = self.asked.get_mut(&request_id).expect("a request");
        let actions = if let Some(arrival) = asked.untaken.take() {
            (asked.cancelled, asked.result) = (true, None);
            self.requester.not_taken(arrival)
        } else if asked.result.is_none() && !asked.cancelled {
            asked.cancelled = true;
            self.requester.cancel(request_id)
        } else {
            return;
        };
        self.follow(actions);
    }

    /// Lets the program take all results.
    pub(super) fn take(&mut self) {
        for SinkAddress(address) in
            self.asked.values_mut().filter_map(|asked| asked.untaken.take()).map(|arrival| arrival.sink)
        {
            self.granted.remove(&address).expect("a sink that is there");
        }
    }

    /// Frees the tensors that no request has taken.
    pub(super) fn age(&mut self) {
        let actions = self.requester.age_untaken();
        self.follow(actions);
    }

    /// Gives the requester its next frame.
    pub(super) fn receive(&mut self) -> bool {
        if self.hangs {
            return false;
        }
        let actions = match self.to_requester.pop_front() {
            None => return false,
            Some(Brought::Frame(bytes)) => self.take_frame(&bytes),
            Some(Brought::Immediate(immediate)) => match Announcement::decode(immediate) {
                Announcement::Written(number) => self.requester.handle_announced(number),
                other => panic!("{other:?} to the requester"),
            },
        };
        self.follow(actions.unwrap());
        true
    }

    fn take_frame(&mut self, bytes: &[u8]) -> Followed<SinkAddress> {
        match Frame::decode(bytes).unwrap().frame {
            Frame::Metadata { request_id, metadata } => self.requester.handle_metadata(request_id, metadata),
            Frame::Written { request_id, checksum } => self.requester.handle_written(request_id, checksum),
            Frame::Status { request_id, code, text } => self.requester.handle_status(request_id, code, &text),
            Frame::Dead { request_id } => self.requester.handle_dead(request_id),
            other => panic!("{other:?} to the requester"),
        }
    }

    /// Makes the sink of a random request, or fails to make it.
    pub(super) fn allocate(&mut self, random: &mut Random, fails: bool) -> bool {
        if self.hangs || self.allocations.is_empty() {
            return false;
        }
        let at = random.below(self.allocations.len() as u64) as usize;
        let (request_id, metadata) = self.allocations.swap_remove(at);
        let actions = if fails {
            self.without_memory.insert(request_id);
            self.requester.sink_failed(request_id, Failure::new(tonic::Code::ResourceExhausted, "no memory"))
        } else {
            // Some sinks are longer than needed.
            let length = metadata.bytes + 8 * random.below(2);
            let address = self.next_address;
            self.next_address += length + 1;
            self.granted.insert(address, vec![0xee; length as usize]);
            let place = RemoteRange { start: RemoteSegment { address, rkey: Rkey(address as u32) }, length };
            self.requester.sink_ready(request_id, SinkAddress(address), place)
        };
        self.follow(actions);
        true
    }

    fn write(&mut self, sink: &TensorMemory, bytes: &[u8]) {
        let RemoteSegment { address, rkey } = sink.place.start;
        assert_eq!((sink.metadata.bytes, rkey.0), (bytes.len() as u64, address as u32));
        let memory = self.granted.get_mut(&address).expect("a write to memory without a grant");
        memory[..bytes.len()].copy_from_slice(bytes);
    }

    fn follow(&mut self, actions: Vec<RequesterAction<SinkAddress>>) {
        for action in actions {
            match action {
                RequesterAction::Send(_, frame) => self.to_provider.push_back(encoded(&frame)),
                RequesterAction::Allocate { request_id, metadata } => {
                    self.allocations.push((request_id, metadata));
                }
                RequesterAction::Free(SinkAddress(address)) => {
                    self.granted.remove(&address).expect("a sink that is freed once");
                }
                RequesterAction::Finished { request_id, result } => self.finished(request_id, result),
            }
        }
    }

    fn finished(&mut self, request_id: RequestId, result: RequestOutcome<SinkAddress>) {
        let mut untaken = None;
        let received = match result {
            RequestOutcome::Arrived(arrival) => {
                let Arrival { metadata, sink: SinkAddress(address), checksum, .. } = arrival;
                let mut bytes = self.granted.get(&address).expect("a sink that is there").clone();
                bytes.truncate(metadata.bytes as usize);
                if let Some(checksum) = checksum {
                    verify(request_id, &bytes, checksum).unwrap();
                }
                untaken = Some(Arrival { sink: SinkAddress(address), ..arrival });
                Received::Tensor(metadata, bytes)
            }
            RequestOutcome::Dead => Received::Dead,
            RequestOutcome::Failed(failure) => Received::Failed(failure),
        };
        let asked = self.asked.get_mut(&request_id).expect("a result of a request");
        assert!(!asked.cancelled, "{request_id}: a result for a cancelled request");
        assert!(asked.result.replace(received).is_none(), "{request_id}: a second result");
        asked.untaken = untaken;
    }

    pub(super) fn assert_nothing_left(&self) {
        assert_eq!(self.requester.pending(), 0);
        assert!(self.granted.is_empty(), "sinks that were never freed");
        let open = self.asked.values().find(|asked| asked.result.is_none() && !asked.cancelled);
        assert!(open.is_none(), "no result: {open:?}");
    }
}

fn encoded(frame: &Frame<'_>) -> Vec<u8> {
    let mut buffer = [0; MAX_FRAME];
    let length = frame.encode(0, &mut buffer).expect("a frame that can be sent");
    buffer[..length].to_vec()
}
