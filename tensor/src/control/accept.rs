//! The gRPC service of a device: accepts links of its callers, and gives them rights.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Extensions;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_stream::Stream;
use tonic::{Code, Request, Response, Status};

use crate::bootstrap::fresh_key;
use crate::control::proto::tensor_device_server::TensorDevice;
use crate::control::proto::{
    AttachReply, AttachRequest, ConfirmReply, ConfirmRequest, DescribeReply, DescribeRequest,
    Link as LinkReply, OpenReply, OpenRequest,
};
use crate::control::{internal, is_seen, peer_parameters, queue_pairs, words};
use crate::device::settings::Settings;
use crate::device::state::{AcceptedLink, DeviceState};
use crate::error::{ALLOW_PLAINTEXT, TensorError, check_name};
use crate::link::words::WordPage;
use crate::link::{Link, LinkId, PeerParameters};
use crate::wire::tensor_frame::MAX_NAME;
use tonic_rdma::unstable::{ClientSlot, Devices, Source, TooManyWaiters};
use tonic_rdma::{Provider, RdmaConnectInfo, RdmaRequestExt as _};
use tonic_rdma_verbs::unstable::{Versions, lock};

/// The stream of answers to an `Open`: one answer, and then nothing until the link ends. When the peer's
/// connection ends, tonic drops the stream, and the drop ends the link.
pub(crate) struct LinkStream {
    link: Weak<Link>,
    first: Option<OpenReply>,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// Creates this side of a link and connects it.
pub(crate) async fn open(
    shared: &Arc<DeviceState>,
    request: OpenRequest,
    caller: Caller,
) -> Result<LinkStream, Status> {
    caller.admit(&shared.settings)?;
    let ours = shared.settings.versions;
    let theirs = Versions { oldest: request.version, newest: request.newest_version.max(request.version) };
    let version = ours.newest.min(theirs.newest);
    if !ours.speaks(version) || !theirs.speaks(version) {
        return Err(Status::failed_precondition(format!(
            "version {theirs} of the tensor service was asked for; this end speaks {ours}"
        )));
    }
    lock(&shared.group).admit(&request.group)?;
    let count = request.queue_pairs.len();
    if !(1..=Settings::MAX_QUEUE_PAIRS as usize).contains(&count) {
        let most = Settings::MAX_QUEUE_PAIRS;
        return Err(Status::invalid_argument(format!("{count} queue pairs: a link has from 1 to {most}")));
    }
    let provider = Provider::named(&request.provider)
        .ok_or_else(|| Status::invalid_argument(format!("no provider {:?}", request.provider)))?;
    let length = request.endpoint.len();
    if length > MAX_NAME {
        return Err(Status::invalid_argument(format!(
            "an endpoint of {length} bytes; it takes at most {MAX_NAME}"
        )));
    }
    let name = if request.endpoint.is_empty() { caller.name() } else { request.endpoint.clone() };
    let OpenRequest { queue_pairs: theirs, words: place, places_in_order, immediate, .. } = &request;
    let peer = peer_parameters(name.into(), theirs, *place, *places_in_order, *immediate, version)
        .map_err(Status::invalid_argument)?;
    let id = fresh_key().map_err(internal)?;
    let limit = shared.settings.answer_timeout;
    let source = source(shared, provider, &peer, caller.source()).await?;
    let unconfirmed = timeout(limit / 2, shared.unconfirmed.take(source)).await;
    let Ok(Ok(unconfirmed)) = unconfirmed else {
        let most = shared.unconfirmed.limit();
        return Err(Status::resource_exhausted(format!(
            "{most} links wait for the confirmation of their peers, which is the limit; try again later"
        )));
    };
    let place = shared.places.try_take(source).ok_or_else(|| {
        let most = shared.settings.max_links;
        Status::resource_exhausted(format!(
            "this peer's user or address has as many links as it may open now (at most {most}); try again later"
        ))
    })?;
    let on_thread = Arc::clone(shared);
    let work = move || {
        let prepared = on_thread.prepare(provider, count as u32).map_err(internal)?;
        let reply = OpenReply {
            link: id.to_vec().into(),
            queue_pairs: queue_pairs(&prepared),
            words: Some(words(&prepared)),
            places_in_order: prepared.places_in_order(),
            immediate: prepared.immediate(),
            device: prepared.device().to_owned(),
            version,
        };
        let link = prepared.connect(id, &peer, on_thread.named_tensors(&peer)).map_err(unfit)?;
        // The places are held until here, because this work continues if the peer gives up.
        Ok::<_, Status>((link, reply, unconfirmed, place))
    };
    let (link, reply, unconfirmed, place) = tokio::task::spawn_blocking(work).await.map_err(internal)??;
    let (confirm, confirmed) = oneshot::channel();
    let weak = Arc::downgrade(&link);
    let accepted = AcceptedLink { link: weak.clone(), opener: caller, unconfirmed: Some(confirm) };
    lock(&shared.accepted).insert(id, accepted);
    let ended = Box::pin(link.ended());
    let confirmation = Confirmation { confirmed, limit, place: unconfirmed };
    tokio::spawn(keep(link, Arc::downgrade(shared), confirmation, place));
    Ok(LinkStream { link: weak, first: Some(reply), ended })
}

/// Asks the device of `peer` whether all queue pairs wait there for this side, because connecting them blocks
/// a thread until that device answers. Returns the source that the link counts for: the address of the
/// caller, and the owner of the device.
async fn source(
    shared: &DeviceState,
    provider: Provider,
    peer: &PeerParameters,
    address: Source,
) -> Result<Source, Status> {
    let limit = shared.settings.answer_timeout / 2;
    let busy = || Status::resource_exhausted("too many peers open links; try again later");
    let place = timeout(limit, shared.asking.take(address)).await;
    let place = place.map_err(|_| busy())?.map_err(|TooManyWaiters| busy())?;
    place.waits_for(Settings::LEAST_WAIT);
    let mut devices = Devices::default();
    let asked = async {
        let mut source = address;
        for (address, _) in &peer.queue_pairs {
            if let Some(owner) = devices.ask(provider, address).await.map_err(unfit)? {
                source = source.with_owner(owner);
            }
        }
        Ok(source)
    };
    tokio::select! {
        asked = timeout(limit, asked) => asked.unwrap_or_else(|_| {
            Err(Status::failed_precondition(format!("the peer's device did not answer within {limit:?}")))
        }),
        () = place.lost() => Err(busy()),
    }
}

fn unfit(error: impl std::fmt::Display) -> Status {
    Status::failed_precondition(format!("the two ends do not fit: {error}"))
}

/// The confirmation of a link, which the peer still owes.
struct Confirmation {
    confirmed: oneshot::Receiver<()>,
    /// The longest time until it arrives.
    limit: Duration,
    place: ClientSlot,
}

impl Confirmation {
    /// Waits for the confirmation, until its time is over or another peer gets the place.
    async fn wait(self) -> Result<(), TensorError> {
        let Self { mut confirmed, limit, place } = self;
        place.waits();
        let given_up = tokio::select! {
            biased;
            result = timeout(limit, &mut confirmed) => match result {
                Ok(_) => return Ok(()),
                Err(_) => TensorError::timeout("the peer's confirmation", limit),
            },
            () = place.lost() => {
                TensorError::other("the peer did not confirm the link, and another peer got its place")
            }
        };
        // From here on a confirmation fails, so that the peer learns that it was too late.
        confirmed.close();
        confirmed.try_recv().map_err(|_| given_up)
    }
}

/// Keeps a link until it ends, and ends a link that its peer does not confirm in time. A separate task does
/// this, because a peer that reads no answers would keep the stream of answers from being polled.
async fn keep(link: Arc<Link>, shared: Weak<DeviceState>, confirmation: Confirmation, place: ClientSlot) {
    tokio::select! {
        () = link.ended() => {}
        confirmed = confirmation.wait() => match confirmed {
            Ok(()) => link.ended().await,
            Err(error) => {
                link.fail(error);
            }
        }
    }
    if let Some(shared) = shared.upgrade() {
        lock(&shared.accepted).remove(&link.id);
    }
    drop((link, place));
}

/// Confirms a link: both sides have connected, and both have read the evidence in the memory of the other
/// side.
pub(crate) fn confirm(
    shared: &DeviceState,
    request: &ConfirmRequest,
    caller: &Caller,
) -> Result<ConfirmReply, Status> {
    let given_up = || {
        Status::aborted(
            "the link was given up: it was not confirmed in time, or others needed its place; open it again",
        )
    };
    let found = find(shared, &request.link, caller);
    let (id, link) = found.map_err(|status| match status.code() {
        // No link that peers know is missing for another reason.
        Code::NotFound => given_up(),
        _ => status,
    })?;
    if link.fault().is_some() {
        return Err(given_up());
    }
    let probes: Vec<_> = link.ports().map(|port| port.probe()).collect();
    if !is_seen(&probes, &request.read) {
        let fault = link.violation("it does not see this process' memory");
        link.fail(fault.clone());
        return Err(Status::failed_precondition(fault.to_string()));
    }
    let unconfirmed = lock(&shared.accepted).get_mut(&id).and_then(|it| it.unconfirmed.take());
    if let Some(keeper) = unconfirmed {
        keeper.send(()).map_err(|()| given_up())?;
    }
    Ok(ConfirmReply { read: probes.iter().map(|probe| probe.peers.unwrap_or(0)).collect() })
}

/// Gives a peer its right to the region or slot of a name.
pub(crate) fn attach(
    shared: &DeviceState,
    request: &AttachRequest,
    caller: &Caller,
) -> Result<AttachReply, Status> {
    let (id, link) = find(shared, &request.link, caller)?;
    if lock(&shared.accepted).get(&id).is_none_or(|it| it.unconfirmed.is_some()) {
        return Err(Status::failed_precondition("the link has to be confirmed first"));
    }
    let name = &request.name;
    check_name(name).map_err(|error| Status::invalid_argument(error.reason()))?;
    if request.words > WordPage::LAST {
        let pair = request.words;
        return Err(Status::invalid_argument(format!("pair {pair} of the caller's words, which it has not")));
    }
    let offered = lock(&shared.attachables).get(&**name).cloned();
    let missing = || Status::not_found(format!("nothing is on offer under {name:?}"));
    let offered = offered.as_ref().and_then(Weak::upgrade).ok_or_else(missing)?;
    offered.attach(&link, request)
}

/// Returns the link of this name, if the caller opened it.
fn find(shared: &DeviceState, id: &[u8], caller: &Caller) -> Result<(LinkId, Arc<Link>), Status> {
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

impl Stream for LinkStream {
    type Item = Result<OpenReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.first.take() {
            Some(reply) => Poll::Ready(Some(Ok(reply))),
            None => self.ended.as_mut().poll(context).map(|()| None),
        }
    }
}

impl Drop for LinkStream {
    fn drop(&mut self) {
        if let Some(link) = self.link.upgrade() {
            link.peer_left("its process closed the link, ended or was killed");
        }
    }
}

/// The caller of the service. A link belongs to the connection that it was opened over. Everything that the
/// other side proved on this connection, such as a certificate in the TLS handshake, holds for the link too.
/// The name of a link gives no access on another connection.
pub(crate) struct Caller {
    /// `None` if the call came by a listener other than `RdmaIncoming`.
    info: Option<RdmaConnectInfo>,
}

impl Caller {
    pub(crate) fn of(extensions: &Extensions) -> Self {
        Self { info: extensions.connection().cloned() }
    }

    /// Refuses a caller whose connection is encrypted, or may be, unless the settings allow unencrypted
    /// tensors.
    pub(crate) fn admit(&self, settings: &Settings) -> Result<(), Status> {
        let obstacle = match &self.info {
            _ if settings.allows_plaintext() => return Ok(()),
            Some(info) if info.is_plaintext() => return Ok(()),
            Some(_) => "this call came over TLS",
            None => "this call came by a listener other than RdmaIncoming, and could have come over TLS",
        };
        Err(Status::failed_precondition(format!(
            "{obstacle}, and tensors would cross the network unencrypted beside it: if that is acceptable, set {ALLOW_PLAINTEXT} here"
        )))
    }

    /// Returns the name of the caller for log lines and errors.
    pub(crate) fn name(&self) -> String {
        self.info.as_ref().map_or_else(|| "a peer".to_owned(), |info| info.peer_addr().to_string())
    }

    /// Returns the address that the call came from.
    pub(crate) fn source(&self) -> Source {
        self.info.as_ref().map_or(Source::UNKNOWN, |info| info.peer_addr().ip().into())
    }

    /// Returns whether both calls came over one connection. For two calls by other listeners this is unknown,
    /// and the result is true.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (&self.info, &other.info) {
            (Some(one), Some(other)) => one.is_same_connection(other),
            (None, None) => true,
            _ => false,
        }
    }
}

/// The service. It answers while the device exists.
pub(crate) struct Service {
    shared: Weak<DeviceState>,
}

impl Service {
    pub(crate) fn new(shared: &Arc<DeviceState>) -> Self {
        Self { shared: Arc::downgrade(shared) }
    }

    fn shared(&self) -> Result<Arc<DeviceState>, Status> {
        self.shared.upgrade().ok_or_else(|| Status::unavailable("the tensor device has been closed"))
    }
}

#[tonic::async_trait]
impl TensorDevice for Service {
    type OpenStream = LinkStream;

    async fn open(&self, request: Request<OpenRequest>) -> Result<Response<LinkStream>, Status> {
        let caller = Caller::of(request.extensions());
        let shared = self.shared()?;
        Ok(Response::new(open(&shared, request.into_inner(), caller).await?))
    }

    async fn confirm(&self, request: Request<ConfirmRequest>) -> Result<Response<ConfirmReply>, Status> {
        let caller = Caller::of(request.extensions());
        Ok(Response::new(confirm(&*self.shared()?, request.get_ref(), &caller)?))
    }

    async fn attach(&self, request: Request<AttachRequest>) -> Result<Response<AttachReply>, Status> {
        let caller = Caller::of(request.extensions());
        Ok(Response::new(attach(&*self.shared()?, request.get_ref(), &caller)?))
    }

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeReply>, Status> {
        let shared = self.shared()?;
        if !shared.settings.listed {
            return Err(Status::permission_denied("this tensor device does not list its regions and slots"));
        }
        let mut offered: Vec<_> =
            shared.attachables().into_iter().map(|(name, offered)| offered.describe(&name)).collect();
        offered.sort_by(|one, other| one.name.cmp(&other.name));
        let living = shared.links();
        let links = living.iter().map(|link| {
            let moved = link.ports().map(|port| port.moved());
            let (bytes_written, bytes_read) = moved.fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
            LinkReply {
                peer: link.peer.to_string(),
                provider: link.provider.into(),
                device: link.device.to_string(),
                queue_pairs: link.ports().count() as u32,
                bytes_written,
                bytes_read,
            }
        });
        Ok(Response::new(DescribeReply {
            versions: (shared.settings.versions.oldest..=shared.settings.versions.newest).collect(),
            software: concat!("tonic-rdma ", env!("CARGO_PKG_VERSION")).into(),
            offered,
            links: links.collect(),
        }))
    }
}
