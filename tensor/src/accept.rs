//! Accepting links, and giving their peers rights: the server's side.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio_stream::Stream;
use tonic::Status;

use super::caller::Caller;
use super::device::{Offered, Shared};
use super::link::{Link, LinkId, Prepared};
use super::open::{peer_end, place, queue_pairs, words};
use super::placement::{AttachError, Placement};
use super::proto::{
    AttachReply, AttachRequest, ConfirmReply, ConfirmRequest, Kind, OpenReply, OpenRequest, Place,
};
use super::region::Export;
use super::settings::Settings;
use super::types::Metadata;
use super::{ChannelError, lock};
use crate::wire::tensor_frame::MAX_NAME;
use crate::wire::tensor_metadata::WireMetadata;
use tonic_rdma::internal::Provider;

/// Version of the service that this end speaks.
pub(super) const VERSION: u32 = 1;

/// A link that a peer opened.
pub(super) struct Accepted {
    pub(super) link: Weak<Link>,
    /// Who may use it.
    opener: Caller,
    /// Tells the link's keeper that the peer has confirmed it; nothing afterwards.
    unconfirmed: Option<oneshot::Sender<()>>,
}

/// The answers to an `Open`: one, and then nothing until the link ends. Dropping it, as tonic does when the peer's connection
/// ends, ends the link.
pub(super) struct Answers {
    link: Weak<Link>,
    first: Option<OpenReply>,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// Creates this end of a link and connects it.
pub(super) async fn open(
    shared: &Arc<Shared>,
    request: OpenRequest,
    caller: Caller,
) -> Result<Answers, Status> {
    caller.admit(&shared.settings)?;
    if request.version != VERSION {
        let asked = request.version;
        return Err(Status::failed_precondition(format!(
            "version {asked} of the tensor service was asked for; this end speaks {VERSION}"
        )));
    }
    let count = request.queue_pairs.len();
    if !(1..=Settings::MAX_QUEUE_PAIRS as usize).contains(&count) {
        let most = Settings::MAX_QUEUE_PAIRS;
        return Err(Status::invalid_argument(format!("{count} queue pairs: a link has from 1 to {most}")));
    }
    let most = shared.settings.max_links;
    let place = Arc::clone(&shared.places).try_acquire_owned();
    let place = place
        .map_err(|_| Status::resource_exhausted(format!("there are {most} links, which is the limit")))?;
    let provider = Provider::named(&request.provider)
        .ok_or_else(|| Status::invalid_argument(format!("no provider {:?}", request.provider)))?;
    let length = request.endpoint.len();
    if length > MAX_NAME {
        return Err(Status::invalid_argument(format!(
            "an endpoint of {length} bytes; it takes at most {MAX_NAME}"
        )));
    }
    let name = if request.endpoint.is_empty() { caller.name() } else { request.endpoint.clone() };
    let peer = peer_end(name.into(), &request.queue_pairs, request.words, &request)
        .map_err(Status::invalid_argument)?;
    let id = new_id().map_err(internal)?;
    let prepared = Prepared::new(provider, count as u32, shared).map_err(internal)?;
    let reply = OpenReply {
        link: id.to_vec().into(),
        queue_pairs: queue_pairs(&prepared),
        words: Some(words(&prepared)),
        places_in_order: prepared.places_in_order(),
        immediate: prepared.immediate(),
        device: prepared.device().to_owned(),
    };
    let exchange = shared.exchange();
    let connected = tokio::task::spawn_blocking(move || prepared.connect(id, &peer, exchange)).await;
    let link = connected.map_err(internal)?;
    let link =
        link.map_err(|error| Status::failed_precondition(format!("the two ends do not fit: {error}")))?;
    let (unconfirmed, confirmed) = oneshot::channel();
    let weak = Arc::downgrade(&link);
    let accepted = Accepted { link: weak.clone(), opener: caller, unconfirmed: Some(unconfirmed) };
    lock(&shared.accepted).insert(id, accepted);
    let ended = Box::pin(link.ended());
    tokio::spawn(keep(link, Arc::downgrade(shared), confirmed, shared.settings.answer_timeout, place));
    Ok(Answers { link: weak, first: Some(reply), ended })
}

/// Keeps a link until it ends, and ends one that its peer does not confirm in time. Not left to the call's answers: a peer
/// that takes none would keep them from being looked at.
async fn keep(
    link: Arc<Link>,
    shared: Weak<Shared>,
    confirmed: oneshot::Receiver<()>,
    patience: Duration,
    place: OwnedSemaphorePermit,
) {
    tokio::select! {
        () = link.ended() => {}
        told = tokio::time::timeout(patience, confirmed) => match told {
            Ok(_) => link.ended().await,
            Err(_) => {
                link.fail(ChannelError::TimedOut { what: "the peer's confirmation", limit: patience });
            }
        }
    }
    if let Some(shared) = shared.upgrade() {
        lock(&shared.accepted).remove(link.id());
    }
    drop((link, place));
}

/// The peer has connected its end; both have read what the other keeps for them.
pub(super) fn confirm(
    shared: &Shared,
    request: &ConfirmRequest,
    caller: &Caller,
) -> Result<ConfirmReply, Status> {
    let (id, link) = find(shared, &request.link, caller)?;
    let probes: Vec<_> = link.ports().map(|port| port.probe()).collect();
    let right = request.read.len() == probes.len()
        && probes.iter().zip(&request.read).all(|(probe, read)| probe.ours.is_none_or(|ours| ours == *read));
    if !right {
        let fault = link.violation("it does not see this process' memory");
        link.fail(fault.clone());
        return Err(Status::failed_precondition(fault.to_string()));
    }
    let unconfirmed = lock(&shared.accepted).get_mut(&id).and_then(|it| it.unconfirmed.take());
    if let Some(keeper) = unconfirmed {
        // It listens for as long as the link lives.
        let _ = keeper.send(());
    }
    Ok(ConfirmReply { read: probes.iter().map(|probe| probe.peers.unwrap_or(0)).collect() })
}

/// Gives a peer its right to what is on offer under a name.
pub(super) fn attach(
    shared: &Shared,
    request: &AttachRequest,
    caller: &Caller,
) -> Result<AttachReply, Status> {
    let (id, link) = find(shared, &request.link, caller)?;
    if lock(&shared.accepted).get(&id).is_none_or(|it| it.unconfirmed.is_some()) {
        return Err(Status::failed_precondition("the link has to be confirmed first"));
    }
    let name = &request.name;
    if !(1..=MAX_NAME).contains(&name.len()) {
        let length = name.len();
        return Err(Status::invalid_argument(format!(
            "a name of {length} bytes; it takes from 1 to {MAX_NAME}"
        )));
    }
    if request.words as usize >= Link::PAIRS {
        let (pair, pairs) = (request.words, Link::PAIRS);
        return Err(Status::invalid_argument(format!("pair {pair} of the caller's words; it has {pairs}")));
    }
    let offered = lock(&shared.offered).get(&**name).cloned();
    let missing = || Status::not_found(format!("nothing is on offer under {name:?}"));
    match offered.ok_or_else(missing)? {
        Offered::Region(export) => attach_region(&export.upgrade().ok_or_else(missing)?, &link, request),
        Offered::Placement(slot) => attach_slot(&slot.upgrade().ok_or_else(missing)?, &link, request),
    }
}

fn attach_region(
    export: &Arc<Export>,
    link: &Arc<Link>,
    request: &AttachRequest,
) -> Result<AttachReply, Status> {
    expect_kind(request, Kind::Region)?;
    let (slot, granted) = export.attach(link, request.words).map_err(internal)?;
    let rights = export.rights();
    let place = Some(place(&granted));
    let epoch = link.load_count(slot);
    let (readable, writable) = (rights.read, rights.write);
    Ok(AttachReply { slot, place, readable, writable, epoch, ..AttachReply::default() })
}

fn attach_slot(
    slot: &Arc<Placement>,
    link: &Arc<Link>,
    request: &AttachRequest,
) -> Result<AttachReply, Status> {
    expect_kind(request, slot.kind())?;
    if let Some(spec) = slot.spec() {
        let offered =
            WireMetadata::decode(&request.metadata).map_err(|error| invalid(&request.name, error))?;
        let offered = Metadata::try_from(offered).map_err(|error| invalid(&request.name, error))?;
        if offered.spec != *spec {
            let (name, offered) = (&request.name, offered.spec);
            return Err(Status::invalid_argument(format!("{name:?} takes {spec}, not {offered}")));
        }
    }
    if request.queue_pair as usize >= link.ports().count() {
        return Err(Status::invalid_argument(format!("queue pair {} does not exist", request.queue_pair)));
    }
    let (pair, granted, epoch) =
        slot.attach(link, request.words, request.queue_pair).map_err(|error| match error {
            AttachError::Taken(peer) => {
                Status::already_exists(format!("{:?} is attached to {peer}", request.name))
            }
            AttachError::InUse => Status::unavailable(format!(
                "what came last into {:?} is still in use; try again later",
                request.name
            )),
            AttachError::Failed(error) => internal(error),
        })?;
    let (stride, tail) = slot.shape();
    let memory: Place = place(&granted);
    Ok(AttachReply {
        slot: pair,
        place: Some(memory),
        readable: false,
        writable: true,
        depth: slot.depth(),
        stride,
        tail,
        epoch,
    })
}

fn expect_kind(request: &AttachRequest, kind: Kind) -> Result<(), Status> {
    let asked = request.kind();
    if asked == kind {
        return Ok(());
    }
    let (name, found, asked) = (&request.name, kind.as_str_name(), asked.as_str_name());
    Err(Status::invalid_argument(format!("{name:?} is {found}, not {asked}")))
}

/// The link of this name, if it is the caller's.
fn find(shared: &Shared, id: &[u8], caller: &Caller) -> Result<(LinkId, Arc<Link>), Status> {
    let missing = || Status::not_found("no such link");
    let id = LinkId::try_from(id).map_err(|_| missing())?;
    let accepted = lock(&shared.accepted);
    let link = accepted.get(&id).ok_or_else(missing)?;
    if !link.opener.is(caller) {
        return Err(Status::permission_denied(
            "a link is used over the connection that opened it, and this is another",
        ));
    }
    Ok((id, link.link.upgrade().ok_or_else(missing)?))
}

fn invalid(name: &str, error: impl std::fmt::Display) -> Status {
    Status::invalid_argument(format!("{name:?}: {error}"))
}

fn internal(error: impl std::fmt::Display) -> Status {
    Status::internal(error.to_string())
}

/// A name that can't be guessed.
fn new_id() -> Result<LinkId, rustix::io::Errno> {
    let mut id = LinkId::default();
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    Ok(id)
}

impl Stream for Answers {
    type Item = Result<OpenReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.first.take() {
            Some(reply) => Poll::Ready(Some(Ok(reply))),
            None => self.ended.as_mut().poll(context).map(|()| None),
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        if let Some(link) = self.link.upgrade() {
            link.fail(ChannelError::PeerLost {
                peer: Arc::clone(link.peer()),
                reason: "its process closed the link, ended or was killed".into(),
            });
        }
    }
}
