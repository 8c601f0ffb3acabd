//! Queue pairs: their two queues, the checks of requests, and the copying.

pub(super) mod connection;
pub(super) mod core;
mod place;
mod receive;
mod send;
mod stores;
mod task;
mod transfer;
mod waiting;

use std::sync::Arc;

use self::core::Core;
use self::receive::ReceiveQueue;
use self::send::SendQueue;
use super::completion_queue::{CompletionSource, Queue, Role, Sink};
use super::device::Device;
use super::domain::Domain;
use crate::{
    Access, PathSettings, PostError, Probe, QueuePair, QueuePairAddress, QueuePairCapacity, QueuePairNumber,
    QueuePairState, ReceiveRequest, SendRequest, VerbsError,
};

/// A queue pair.
#[derive(Debug)]
struct Pair {
    core: Arc<Core>,
    sends: SendQueue,
    receives: ReceiveQueue,
}

/// Creates a queue pair in Reset.
pub(super) fn create(
    domain: &Arc<Domain>,
    send_queue: Arc<Queue>,
    receive_queue: Arc<Queue>,
    capacity: &QueuePairCapacity,
) -> Result<Arc<dyn QueuePair>, VerbsError> {
    check_capacity(domain.device(), capacity)?;
    let core = Core::create(domain, send_queue, receive_queue, capacity)?;
    let pair = Arc::new(Pair {
        sends: SendQueue::new(&core),
        receives: ReceiveQueue::new(&core, capacity.receive_requests),
        core,
    });
    let source: Arc<dyn CompletionSource> = pair.clone();
    pair.core.enter(&source);
    Ok(Arc::new(Handle(pair)))
}

fn check_capacity(device: &Device, capacity: &QueuePairCapacity) -> Result<(), VerbsError> {
    let limits = device.limits();
    let checks = [
        ("send queue depth", capacity.send_requests, limits.max_work_requests),
        ("receive queue depth", capacity.receive_requests, limits.max_work_requests),
        ("segments of a send", capacity.send_segments, limits.max_segments),
        ("segments of a receive", capacity.receive_segments, limits.max_segments),
        ("inline bytes", capacity.inline, limits.max_inline),
    ];
    match checks.into_iter().find(|(_, asked, limit)| asked > limit) {
        Some((what, asked, limit)) => {
            Err(VerbsError::Limit { what, asked: asked.into(), limit: limit.into() })
        }
        None => Ok(()),
    }
}

impl CompletionSource for Pair {
    fn visit(&self, role: Role, sink: &mut Sink<'_>) -> bool {
        if self.core.is_ended() {
            self.core.fail();
        }
        if role.sends && self.sends.has_waiting() {
            self.sends.run_waiting();
        }
        role.receives && self.receives.take(sink)
    }

    fn free_places(&self, places: u32) {
        self.sends.free_places(places);
    }

    fn fail(&self) {
        self.core.fail();
    }
}

/// The user's reference to a queue pair. Dropping it destroys the queue pair.
#[derive(Debug)]
struct Handle(Arc<Pair>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.core.destroy();
    }
}

impl crate::sealed::Sealed for Handle {}

impl QueuePair for Handle {
    fn number(&self) -> QueuePairNumber {
        QueuePairNumber(self.0.core.number())
    }

    fn state(&self) -> QueuePairState {
        self.0.core.state()
    }

    fn capacity(&self) -> &QueuePairCapacity {
        &self.0.core.capacity
    }

    fn local_address(&self) -> QueuePairAddress {
        self.0.core.address().into()
    }

    fn to_init(&self, access: Access) -> Result<(), VerbsError> {
        self.0.core.to_init(access)
    }

    fn to_rtr(&self, peer: &QueuePairAddress, settings: &PathSettings) -> Result<(), VerbsError> {
        self.0.core.to_rtr(peer, settings)
    }

    fn to_rts(&self, settings: &PathSettings) -> Result<(), VerbsError> {
        self.0.core.to_rts(settings)
    }

    fn to_error(&self) {
        self.0.core.fail();
    }

    fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        self.0.sends.post(requests)
    }

    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        self.0.receives.post(requests)
    }

    fn probe(&self) -> Probe {
        let core = &self.0.core;
        Probe { ours: Some(core.nonce()), peers: core.connection().map(|connection| connection.link.nonce()) }
    }

    fn places_in_order(&self) -> bool {
        true
    }
}
