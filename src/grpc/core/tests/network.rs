//! A network between two ends. Messages arrive in order; fetches land in any order, and read the memory of
//! the other side when they land.

use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::sync::{Arc, Weak};
use std::task::Waker;

use bytes::Bytes;
use fastrand::Rng;

use crate::endpoint::{HeldBudget, LandedContent, ReadRefused, ReadSegment, Wire};
use crate::grpc::calls::CallConfig;
use crate::grpc::core::{Core, Role};
use crate::grpc::frame::CallViolation;
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// Memory that the peer may read as long as this is held.
pub(super) type Kept = Arc<Bytes>;

/// What an end's device does.
#[derive(Clone, Debug)]
pub(super) struct Device {
    /// Bytes of a message.
    pub(super) room: usize,
    /// Messages under way.
    pub(super) slots: usize,
    /// How often parts lie in registered memory, in percent.
    pub(super) exposed: u32,
    /// How often there is no memory, in percent.
    pub(super) refused: u32,
    /// The longest fetch.
    pub(super) longest: u64,
    /// The longest fetch that there is memory for in any case, if a reader waits.
    pub(super) reserve: u64,
}

impl Default for Device {
    fn default() -> Self {
        Self { room: 16 << 10, slots: 16, exposed: 0, refused: 0, longest: 1 << 30, reserve: 0 }
    }
}

/// One end: its state machine, its memory, and what is under way to it.
#[derive(Debug)]
pub(super) struct CoreEnd {
    pub(super) core: Core<Kept>,
    pub(super) device: Device,
    /// Messages under way to the other side.
    pub(super) sent: VecDeque<Bytes>,
    memory: HashMap<u64, Weak<Bytes>>,
    next_address: u64,
    pub(super) fetches: Vec<Fetch>,
    /// Content that was made up for fetches, as long as something holds it.
    landed: Vec<Weak<Vec<u8>>>,
    /// A fetch was refused for now.
    pub(super) starved: bool,
    pub(super) messages: usize,
}

impl CoreEnd {
    /// Wakes the tasks that the last command of the state machine woke.
    pub(super) fn wake(&mut self) {
        self.core.after().wakers.drain(..).for_each(Waker::wake);
    }

    /// Returns the bytes of the memory that a device would have registered for this end: what the peer may
    /// read, and what is read from the peer.
    pub(super) fn registered(&mut self) -> u64 {
        self.memory.retain(|_, lent| lent.strong_count() > 0);
        self.landed.retain(|landed| landed.strong_count() > 0);
        let lent = self.memory.values().filter_map(Weak::upgrade).map(|lent| lent.len() as u64);
        let landed = self.landed.iter().filter_map(Weak::upgrade).map(|landed| landed.len() as u64);
        lent.chain(landed).chain(self.fetches.iter().map(Fetch::length)).sum()
    }

    /// Returns the number of fetches under way.
    pub(super) fn fetches(&self) -> usize {
        self.fetches.len()
    }

    /// Ends a fetch with zeros, wherever its content lies.
    pub(super) fn land_zeros(&mut self, index: usize) {
        let fetch = self.fetches.swap_remove(index);
        let zeros = Arc::new(vec![0; if fetch.cancelled { 0 } else { fetch.length() as usize }]);
        self.landed.push(Arc::downgrade(&zeros));
        let content = (!fetch.cancelled).then(|| landed(Bytes::from_owner(Zeros(zeros))));
        self.core.landed(fetch.id, content);
        self.wake();
    }
}

/// Makes content of a fetch.
fn landed(bytes: Bytes) -> LandedContent {
    LandedContent { bytes, is_moved: false }
}

/// Content that was made up.
struct Zeros(Arc<Vec<u8>>);

impl AsRef<[u8]> for Zeros {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// A fetch under way.
#[derive(Debug)]
pub(super) struct Fetch {
    id: u64,
    /// Addresses and lengths in the memory of the other side, or bytes.
    segments: Vec<Result<(u64, u64), Vec<u8>>>,
    cancelled: bool,
}

impl Fetch {
    fn length(&self) -> u64 {
        let length = |segment: &Result<(u64, u64), Vec<u8>>| match segment {
            Ok((_, length)) => *length,
            Err(bytes) => bytes.len() as u64,
        };
        self.segments.iter().map(length).sum()
    }
}

/// The wire of an end.
struct SimulatedWire<'a> {
    device: &'a Device,
    sent: &'a mut VecDeque<Bytes>,
    memory: &'a mut HashMap<u64, Weak<Bytes>>,
    next_address: &'a mut u64,
    fetches: &'a mut Vec<Fetch>,
    starved: &'a mut bool,
    messages: &'a mut usize,
    random: &'a mut Rng,
}

impl SimulatedWire<'_> {
    fn lend(&mut self, bytes: Bytes) -> (RemoteSegment, Kept) {
        let (address, kept) = (*self.next_address, Arc::new(bytes));
        *self.next_address += kept.len() as u64 + 100;
        self.memory.insert(address, Arc::downgrade(&kept));
        (RemoteSegment { address, rkey: Rkey(7) }, kept)
    }
}

impl Wire for SimulatedWire<'_> {
    type Kept = Kept;
    type Fault = std::convert::Infallible;

    fn room(&self) -> usize {
        if self.sent.len() < self.device.slots { self.device.room } else { 0 }
    }

    fn send(&mut self, slices: &[IoSlice<'_>]) -> Result<(), Self::Fault> {
        let message: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
        assert!(!message.is_empty() && message.len() <= self.device.room && self.room() > 0);
        self.sent.push_back(message.into());
        *self.messages += 1;
        Ok(())
    }

    fn expose(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Kept)> {
        let is_exposed = self.random.u32(..100) < self.device.exposed;
        is_exposed.then(|| self.lend(Bytes::copy_from_slice(bytes)))
    }

    fn copy(&mut self, bytes: &[u8]) -> Option<(RemoteSegment, Kept)> {
        let is_refused = self.random.u32(..100) < self.device.refused;
        (!is_refused).then(|| self.lend(Bytes::copy_from_slice(bytes)))
    }

    fn read(
        &mut self,
        id: u64,
        segments: &[ReadSegment<'_>],
        aligned_at: usize,
        is_awaited: bool,
    ) -> Result<(), ReadRefused> {
        let segments: Vec<_> = segments
            .iter()
            .map(|segment| match segment {
                ReadSegment::Remote { from, length } => Ok((from.address, *length)),
                ReadSegment::Inline(bytes) => Err(bytes.to_vec()),
            })
            .collect();
        let lengths = segments
            .iter()
            .map(|segment| segment.as_ref().map_or_else(|bytes| bytes.len() as u64, |segment| segment.1));
        let length: u64 = lengths.sum();
        assert!(length > 0 && (aligned_at as u64) < length);
        if length > self.device.longest {
            return Err(ReadRefused::Never("too long".into()));
        }
        let is_refused = self.random.u32(..100) < self.device.refused;
        if is_refused && !(is_awaited && length <= self.device.reserve) {
            *self.starved = true;
            return Err(ReadRefused::Later);
        }
        self.fetches.push(Fetch { id, segments, cancelled: false });
        Ok(())
    }

    fn ask_again(&mut self) {
        *self.starved = true;
    }

    fn cancel_read(&mut self, id: u64) {
        self.fetches.iter_mut().filter(|fetch| fetch.id == id).for_each(|fetch| fetch.cancelled = true);
    }
}

/// Two ends: a client, and a server.
#[derive(Debug)]
pub(super) struct CorePair {
    pub(super) ends: [CoreEnd; 2],
    pub(super) random: Rng,
}

/// Limits of an end: calls, bytes of headers, and bytes of a window.
pub(super) type Limits = (u32, usize, usize);

impl CorePair {
    pub(super) fn new(seed: u64, limits: [Limits; 2], devices: [Device; 2]) -> Self {
        Self::with_limit(seed, limits, devices, [u64::MAX; 2], true)
    }

    /// Makes two ends that may hold `most` bytes. `has_windows`: both know windows of the connection.
    pub(super) fn with_limit(
        seed: u64,
        limits: [Limits; 2],
        devices: [Device; 2],
        most: [u64; 2],
        has_windows: bool,
    ) -> Self {
        let [client, server] = devices;
        let config = |(streams, head, window): Limits| {
            let config = CallConfig::default().max_concurrent_streams(streams).max_header_list_size(head);
            config.stream_window(window)
        };
        let core = |role: Role, (limits, most): (Limits, u64)| {
            Core::new(role, &config(limits), most, has_windows, HeldBudget::new(u64::MAX).share())
        };
        let end = |role: Role, limits: [Limits; 2], device| CoreEnd {
            core: core(role, (limits[role as usize], most[role as usize])),
            device,
            sent: VecDeque::new(),
            memory: HashMap::new(),
            next_address: 1000,
            fetches: Vec::new(),
            landed: Vec::new(),
            starved: false,
            messages: 0,
        };
        let ends = [end(Role::Client, limits, client), end(Role::Server, limits, server)];
        let mut pair = Self { ends, random: Rng::with_seed(seed) };
        pair.transmit(0);
        pair.transmit(1);
        pair
    }

    pub(super) fn alike() -> Self {
        let limits = (1 << 16, 16 << 10, 1 << 20);
        Self::new(0, [limits, limits], [Device::default(), Device::default()])
    }

    /// Lets an end send.
    pub(super) fn transmit(&mut self, index: usize) {
        self.transmit_and(index, || ());
    }

    /// Lets an end send. `then`: what others do before the tasks are woken.
    pub(super) fn transmit_and(&mut self, index: usize, mut then: impl FnMut()) {
        let CoreEnd { core, device, sent, memory, next_address, fetches, starved, messages, .. } =
            &mut self.ends[index];
        let random = &mut self.random;
        *starved = false;
        loop {
            let mut wire =
                SimulatedWire { device, sent, memory, next_address, fetches, starved, messages, random };
            let Ok(()) = core.transmit(&mut wire);
            then();
            core.after().wakers.drain(..).for_each(Waker::wake);
            if !core.transmits_again() {
                return;
            }
        }
    }

    /// Delivers the next message to an end. Returns whether there was one.
    pub(super) fn deliver(&mut self, to: usize) -> bool {
        let Some(message) = self.ends[1 - to].sent.pop_front() else { return false };
        self.receive(to, message).expect("a peer that keeps the rules");
        self.transmit(to);
        // There is room again at the sender.
        self.transmit(1 - to);
        true
    }

    /// Hands a message to an end.
    pub(super) fn receive(&mut self, to: usize, message: Bytes) -> Result<(), CallViolation> {
        let received = self.ends[to].core.receive(message);
        self.ends[to].wake();
        received
    }

    /// Ends one fetch of an end, any of them. Returns whether there was one.
    pub(super) fn land(&mut self, end: usize) -> bool {
        let fetches = self.ends[end].fetches.len();
        if fetches == 0 {
            return false;
        }
        let fetch = self.ends[end].fetches.swap_remove(self.random.usize(..fetches));
        let memory = &self.ends[1 - end].memory;
        let mut content = Vec::new();
        for segment in fetch.segments {
            match segment {
                Ok((address, length)) => content.extend_from_slice(&read(memory, address, length)),
                Err(bytes) => content.extend(bytes),
            }
        }
        let content = (!fetch.cancelled).then(|| landed(content.into()));
        self.ends[end].core.landed(fetch.id, content);
        self.ends[end].wake();
        self.transmit(end);
        true
    }

    /// Carries out what is under way until nothing is.
    pub(super) fn settle(&mut self) {
        for _ in 0..1_000_000 {
            let mut moved = false;
            for end in [0, 1] {
                moved |= self.deliver(end);
                moved |= self.land(end);
                if self.ends[end].starved {
                    self.transmit(end);
                    moved = true;
                }
            }
            if !moved {
                return;
            }
        }
        panic!("the ends never become silent");
    }
}

/// Reads memory of an end, which must not have been given back.
fn read(memory: &HashMap<u64, Weak<Bytes>>, address: u64, length: u64) -> Bytes {
    let held = memory.iter().find_map(|(start, bytes)| {
        let bytes = bytes.upgrade()?;
        let offset = address.checked_sub(*start)? as usize;
        (offset + length as usize <= bytes.len()).then(|| bytes.slice(offset..offset + length as usize))
    });
    held.expect("a READ of memory that was given back, or never lent")
}
