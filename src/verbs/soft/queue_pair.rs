//! Queue pairs: their states, what they share with the peer, and posting. What sends do is in [`send`](super::send),
//! what becomes of receives in [`receive`](super::receive).

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::super::{
    Access, CompletionQueue, CompletionStatus, HostMemory, PathSettings, PostError, PostErrorKind, Probe,
    QueuePair, QueuePairAddress, QueuePairCapacity, QueuePairNumber, QueuePairState, ReceiveRequest,
    SendRequest, VerbsError, WorkCompletion,
};
use super::address::Address;
use super::completion::SoftCompletionQueue;
use super::domain::SoftDomain;
use super::layout::pair_page::{self, Rings};
use super::link;
use super::lock;
use super::peer::{Peer, PeerPair};
use super::receive::ReceiveSide;
use super::send::SendSide;
use super::shared::{Words, fd_of, random};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct SoftQueuePair {
    pub(super) domain: Arc<SoftDomain>,
    number: QueuePairNumber,
    token: u64,
    nonce: u64,
    pub(super) capacity: QueuePairCapacity,
    pub(super) page: Words,
    memory: Arc<HostMemory>,
    pub(super) rings: Rings,
    pub(super) send_queue: Arc<SoftCompletionQueue>,
    pub(super) receive_queue: Arc<SoftCompletionQueue>,
    send_slot: usize,
    receive_slot: usize,
    state: AtomicU8,
    pub(super) peer: OnceLock<PeerPair>,
    pub(super) path: OnceLock<PathSettings>,
    pub(super) sends: Mutex<SendSide>,
    pub(super) receives: Mutex<ReceiveSide>,
    pub(super) this: Weak<Self>,
}

const STATES: [QueuePairState; 5] = [
    QueuePairState::Reset,
    QueuePairState::Init,
    QueuePairState::Rtr,
    QueuePairState::Rts,
    QueuePairState::Error,
];

fn index(state: QueuePairState) -> u8 {
    match state {
        QueuePairState::Reset => 0,
        QueuePairState::Init => 1,
        QueuePairState::Rtr => 2,
        QueuePairState::Rts => 3,
        QueuePairState::Error => 4,
    }
}

impl SoftQueuePair {
    pub(super) fn create(
        domain: Arc<SoftDomain>,
        send_queue: &Arc<dyn CompletionQueue>,
        receive_queue: &Arc<dyn CompletionQueue>,
        capacity: &QueuePairCapacity,
    ) -> Result<Arc<Self>, VerbsError> {
        let (send_queue, receive_queue) = (ours(&domain, send_queue)?, ours(&domain, receive_queue)?);
        check(&domain, capacity)?;
        let rings = Rings::for_capacity(capacity);
        let (page, memory) = Words::create(rings.words())?;
        let nonce = random();
        page.at(pair_page::NONCE).store(nonce, Ordering::SeqCst);
        let directory = Arc::clone(domain.device.directory());
        let number = directory.number();
        let mut refused = None;
        let pair = Arc::new_cyclic(|this| {
            let mut slot = |queue: &SoftCompletionQueue| {
                queue.attach(this).unwrap_or_else(|error| {
                    refused = Some(error);
                    0
                })
            };
            let send_slot = slot(&send_queue);
            let receive_slot =
                if Arc::ptr_eq(&send_queue, &receive_queue) { send_slot } else { slot(&receive_queue) };
            Self {
                domain: Arc::clone(&domain),
                number: QueuePairNumber(number),
                token: random(),
                nonce,
                capacity: capacity.clone(),
                page,
                memory,
                rings,
                send_queue: Arc::clone(&send_queue),
                receive_queue: Arc::clone(&receive_queue),
                send_slot,
                receive_slot,
                state: AtomicU8::new(0),
                peer: OnceLock::new(),
                path: OnceLock::new(),
                sends: Mutex::default(),
                receives: Mutex::default(),
                this: Weak::clone(this),
            }
        });
        if let Some(error) = refused {
            return Err(error);
        }
        domain.attach(Arc::downgrade(&pair));
        lock(&directory.queue_pairs).insert(number, Arc::downgrade(&pair));
        Ok(pair)
    }

    pub(super) fn token(&self) -> u64 {
        self.token
    }

    /// Passes to a peer what it asks for; false if it does not take it.
    pub(super) fn export(&self, to: BorrowedFd<'_>, segment: u64) -> bool {
        if segment != 0 {
            let memory = self.domain.segment(segment);
            return match memory.as_deref().map(fd_of) {
                Some(Ok(fd)) => link::grant(to, &[], &[fd]),
                _ => link::refuse(to, "no such memory"),
            };
        }
        let (receives, sends) = (&self.receive_queue, &self.send_queue);
        let descriptors =
            [self.memory.as_ref(), self.domain.memory(), receives.memory(), sends.memory()].map(fd_of);
        let [Ok(page), Ok(table), Ok(receive_page), Ok(send_page)] = descriptors else {
            return link::refuse(to, "memory without a descriptor");
        };
        let numbers = [
            self.rings.entries,
            self.rings.segments as u64,
            receives.id(),
            self.receive_slot as u64,
            sends.id(),
            self.send_slot as u64,
        ];
        let all = [page, table, receive_page, receives.event_fd(), send_page, sends.event_fd()];
        let count = if receives.id() == sends.id() { 4 } else { 6 };
        link::grant(to, &numbers, &all[..count])
    }

    /// Whether the peer is in the middle of something with the region of `key`.
    pub(super) fn peer_works_with(&self, key: u32) -> bool {
        self.page.at(pair_page::HAZARD).load(Ordering::SeqCst) == hazard(key)
            && self.peer.get().is_some_and(|pair| !pair.peer.is_dead())
    }

    /// Has this queue pair looked at with the next poll of either completion queue.
    pub(super) fn look(&self) {
        self.receive_queue.mark(self.receive_slot);
        if self.send_slot != self.receive_slot || !Arc::ptr_eq(&self.send_queue, &self.receive_queue) {
            self.send_queue.mark(self.send_slot);
        }
    }

    /// A completion queue has this queue pair's bit: does what there is to do, and fills in completions of receives.
    /// Returns how many, and whether there are more.
    pub(super) fn progress(
        &self,
        queue: &SoftCompletionQueue,
        completions: &mut [WorkCompletion],
    ) -> (usize, bool) {
        if queue.id() == self.send_queue.id() {
            self.retry_sends();
        }
        if queue.id() == self.receive_queue.id() { self.take_receives(completions) } else { (0, false) }
    }

    /// The peer's process is gone.
    pub(super) fn peer_died(&self) {
        self.end_sends(&mut lock(&self.sends), CompletionStatus::RetryExceeded);
    }

    /// Whether the peer said, or its death says, that this queue pair is no more use.
    pub(super) fn is_doomed(&self) -> bool {
        self.page.at(pair_page::FATAL).load(Ordering::Acquire) != 0
            || self.peer.get().is_some_and(|pair| pair.peer.is_dead())
    }

    pub(super) fn is_in(&self, state: QueuePairState) -> bool {
        self.state() == state
    }

    /// Goes to Error; the caller flushes.
    pub(super) fn set_error(&self) {
        self.state.store(index(QueuePairState::Error), Ordering::SeqCst);
        self.page.at(pair_page::STATE).store(pair_page::CLOSED, Ordering::SeqCst);
    }

    fn step(&self, call: &'static str, from: QueuePairState, to: QueuePairState) -> Result<(), VerbsError> {
        self.state
            .compare_exchange(index(from), index(to), Ordering::SeqCst, Ordering::SeqCst)
            .map(|_| ())
            .map_err(|_| VerbsError::State { call, state: self.state() })
    }
}

/// What the hazard word holds while a peer works with a key.
pub(super) fn hazard(key: u32) -> u64 {
    1 << 32 | u64::from(key)
}

fn ours(
    domain: &SoftDomain,
    queue: &Arc<dyn CompletionQueue>,
) -> Result<Arc<SoftCompletionQueue>, VerbsError> {
    let any: &dyn Any = queue.as_ref();
    any.downcast_ref::<SoftCompletionQueue>()
        .filter(|queue| Arc::ptr_eq(queue.device(), &domain.device))
        .and_then(SoftCompletionQueue::handle)
        .ok_or(VerbsError::Foreign("completion queue"))
}

fn check(domain: &SoftDomain, capacity: &QueuePairCapacity) -> Result<(), VerbsError> {
    let attributes = domain.device.attributes();
    for (what, asked, limit) in [
        ("send queue depth", capacity.send_requests, attributes.max_work_requests),
        ("receive queue depth", capacity.receive_requests, attributes.max_work_requests),
        ("segments of a send", capacity.send_segments, attributes.max_segments),
        ("segments of a receive", capacity.receive_segments, attributes.max_segments),
        ("inline bytes", capacity.inline, attributes.max_inline),
    ] {
        if asked > limit {
            return Err(VerbsError::Limit { what, asked: asked.into(), limit: limit.into() });
        }
    }
    Ok(())
}

impl QueuePair for SoftQueuePair {
    fn number(&self) -> QueuePairNumber {
        self.number
    }

    fn state(&self) -> QueuePairState {
        let index = usize::from(self.state.load(Ordering::SeqCst));
        STATES.get(index).copied().unwrap_or(QueuePairState::Error)
    }

    fn capacity(&self) -> &QueuePairCapacity {
        &self.capacity
    }

    fn local_address(&self) -> QueuePairAddress {
        let device = self.domain.device.directory().nonce;
        let (queue_pair, token) = (self.number.0, self.token);
        Address { pid: std::process::id(), device, queue_pair, token }.encode()
    }

    fn to_init(&self, access: Access) -> Result<(), VerbsError> {
        self.step("to_init", QueuePairState::Reset, QueuePairState::Init)?;
        self.page.at(pair_page::ACCESS).store(access.bits().into(), Ordering::SeqCst);
        Ok(())
    }

    fn to_rtr(&self, peer: &QueuePairAddress, settings: &PathSettings) -> Result<(), VerbsError> {
        if !self.is_in(QueuePairState::Init) {
            return Err(VerbsError::State { call: "to_rtr", state: self.state() });
        }
        let address = Address::decode(peer)?;
        let device = Peer::connect(&self.domain.device, &address)?;
        let pair = device.import(&address)?;
        lock(&self.sends).map_table(&pair);
        self.step("to_rtr", QueuePairState::Init, QueuePairState::Rtr)?;
        let _ = self.path.set(settings.clone());
        let _ = self.peer.set(pair);
        self.page.at(pair_page::STATE).store(pair_page::OPEN, Ordering::SeqCst);
        device.attach(Weak::clone(&self.this));
        // The peer may have died, or begun to wait for us, before this queue pair was known to it.
        if device.is_dead() {
            self.peer_died();
        }
        self.wake_waiting_peer();
        Ok(())
    }

    fn to_rts(&self, _: &PathSettings) -> Result<(), VerbsError> {
        self.step("to_rts", QueuePairState::Rtr, QueuePairState::Rts)
    }

    fn to_error(&self) {
        self.fail_sends(&mut lock(&self.sends));
    }

    fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        let state = self.state();
        if !matches!(state, QueuePairState::Rts | QueuePairState::Error) {
            return Err(PostError { index: 0, kind: PostErrorKind::State(state) });
        }
        let mut side = lock(&self.sends);
        for (index, request) in requests.iter().enumerate() {
            self.post_one(&mut side, request).map_err(|kind| PostError { index, kind })?;
        }
        Ok(())
    }

    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let state = self.state();
        if state == QueuePairState::Reset {
            return Err(PostError { index: 0, kind: PostErrorKind::State(state) });
        }
        let mut side = lock(&self.receives);
        for (index, request) in requests.iter().enumerate() {
            self.post_one_receive(&mut side, request).map_err(|kind| PostError { index, kind })?;
        }
        drop(side);
        self.wake_waiting_peer();
        if self.is_in(QueuePairState::Error) {
            self.look();
        }
        Ok(())
    }

    fn probe(&self) -> Probe {
        let read = |pair: &PeerPair| pair.page.at(pair_page::NONCE).load(Ordering::SeqCst);
        Probe { ours: Some(self.nonce), peers: self.peer.get().map(read) }
    }
}

impl Drop for SoftQueuePair {
    fn drop(&mut self) {
        self.page.at(pair_page::STATE).store(pair_page::CLOSED, Ordering::SeqCst);
        self.wake_waiting_peer();
        lock(&self.domain.device.directory().queue_pairs).remove(&self.number.0);
    }
}
