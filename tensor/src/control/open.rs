//! The client's side of the service: opens a link.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::timeout;
use tonic::Code;
use tonic::transport::Endpoint;

use crate::control::proto::tensor_device_client::TensorDeviceClient;
use crate::control::proto::{ConfirmRequest, OpenReply, OpenRequest};
use crate::control::{PeerService, is_seen, peer_parameters, queue_pairs, refused, words};
use crate::device::state::DeviceState;
use crate::error::TensorError;
use crate::link::{Link, LinkId, Prepared};
use crate::named_driver::NamedRequester;
use tonic_rdma::{Provider, RdmaConnectInfo, RdmaConnector, Verdict};
use tonic_rdma_verbs::Probe;
use tonic_rdma_verbs::unstable::{chain, lock};

/// Opens a link to the device that listens on `endpoint`, within the answer timeout of the settings.
pub(crate) async fn open(shared: Arc<DeviceState>, endpoint: Arc<str>) -> Result<OpenedLink, TensorError> {
    let limit = shared.settings.answer_timeout;
    /// Pause before a link is opened again.
    const PAUSE: Duration = Duration::from_millis(20);
    let opening = LinkOpener { shared, endpoint };
    let opened = timeout(limit, async {
        loop {
            if let Some(opened) = opening.run().await? {
                return Ok(opened);
            }
            tokio::time::sleep(PAUSE).await;
        }
    });
    opened.await.unwrap_or(Err(TensorError::timeout("opening a link", limit)))
}

/// A link that was opened from here.
pub(crate) struct OpenedLink {
    pub(crate) link: Arc<Link>,
    /// The requests for tensors of the peer.
    pub(crate) requests: Arc<NamedRequester>,
    pub(crate) service: PeerService,
}

struct LinkOpener {
    shared: Arc<DeviceState>,
    endpoint: Arc<str>,
}

impl LinkOpener {
    /// Opens a link. Returns `None` if the peer has given the link up before it was confirmed.
    async fn run(&self) -> Result<Option<OpenedLink>, TensorError> {
        let (mut client, provider) = self.connect().await?;
        let settings = &self.shared.settings;
        let (shared, queue_pairs) = (Arc::clone(&self.shared), settings.config.get_queue_pairs_per_peer());
        let prepare = move || shared.prepare(provider, queue_pairs);
        let prepared = tokio::task::spawn_blocking(prepare).await.map_err(TensorError::local)??;
        let request = request(&prepared, provider, &self.shared);
        let answers = client.open(request).await.map_err(|status| self.refused(&status))?;
        let mut answers = answers.into_inner();
        let reply = answers.message().await.map_err(|status| self.refused(&status))?;
        let reply = reply.ok_or_else(|| self.no_rdma("it ended the call without an answer"))?;
        let id = LinkId::try_from(&reply.link[..]).map_err(|_| self.no_rdma("it named no link"))?;
        let OpenReply { queue_pairs, words, places_in_order, immediate, version, .. } = reply;
        let endpoint = Arc::clone(&self.endpoint);
        let peer = match settings.versions.speaks(version) {
            true => peer_parameters(endpoint, &queue_pairs, words, places_in_order, immediate, version),
            false => Err(format!("it chose version {version} of the tensor service")),
        };
        let peer = peer.map_err(|reason| self.no_rdma(reason))?;
        // This may block, because it needs the peer's device.
        let named = self.shared.named_tensors(&peer);
        let requests = Arc::clone(&named.requests);
        let connected = tokio::task::spawn_blocking(move || prepared.connect(id, &peer, named)).await;
        let link = match connected.map_err(TensorError::local)? {
            Ok(link) => link,
            // The peer's queue pairs may be gone because it has given the link up. A confirmation without
            // evidence asks for that.
            Err(error) => match self.confirm(&mut client, id, &[]).await {
                Ok(false) => return Ok(None),
                _ => return Err(error),
            },
        };
        let probes: Vec<_> = link.ports().map(|port| port.probe()).collect();
        if !self.confirm(&mut client, id, &probes).await? {
            return Ok(None);
        }
        tokio::spawn(watch(Arc::downgrade(&link), answers));
        let endpoint = Arc::clone(&self.endpoint);
        let service = PeerService { endpoint, client, answer_timeout: settings.answer_timeout };
        Ok(Some(OpenedLink { link, requests, service }))
    }

    /// Connects over the ordinary transport, and learns which RDMA device the connection uses.
    async fn connect(
        &self,
    ) -> Result<(TensorDeviceClient<tonic::transport::Channel>, Provider), TensorError> {
        let endpoint = self.target()?;
        let connector = RdmaConnector::new().config(self.shared.settings.config.clone());
        let channel = endpoint.connect_with_connector(connector.clone()).await;
        // The outermost message of tonic gives no reason.
        let channel = channel.map_err(|error| self.no_rdma(chain(&error)).because(error))?;
        let info: Option<RdmaConnectInfo> = connector.last_connection();
        let info = info.ok_or_else(|| self.no_rdma("no connection was made"))?;
        if info.verdict() != Verdict::Rdma {
            return Err(self.no_rdma(info.reason()));
        }
        let provider = info.provider().and_then(Provider::named);
        let provider = provider.ok_or_else(|| self.no_rdma("the connection names no device"))?;
        Ok((TensorDeviceClient::new(channel), provider))
    }

    /// Returns the endpoint to connect to. Refuses TLS unless the settings allow unencrypted tensors.
    fn target(&self) -> Result<Endpoint, TensorError> {
        let settings = &self.shared.settings;
        let bad = |error: &dyn std::fmt::Display| {
            self.no_rdma(format!("{:?} is no host:port, http:// or https://: {error}", self.endpoint))
        };
        let uri = match self.endpoint.split_once("://") {
            Some(_) => self.endpoint.to_string(),
            None => format!("{}://{}", settings.tls.client_scheme(), self.endpoint),
        };
        let endpoint = Endpoint::from_shared(uri).map_err(|error| bad(&error))?;
        match endpoint.uri().scheme_str() {
            Some("http") => Ok(endpoint),
            Some("https") if !settings.allows_plaintext() => {
                Err(TensorError::plaintext_refused(&self.endpoint))
            }
            Some("https") => {
                settings.tls.secure(endpoint).map_err(|reason| self.no_rdma(&reason).because(reason))
            }
            scheme => Err(bad(&format!("the scheme is {:?}", scheme.unwrap_or("missing")))),
        }
    }

    /// Proves that both sides see one another's memory. Returns false if the peer has given the link up.
    async fn confirm(
        &self,
        client: &mut TensorDeviceClient<tonic::transport::Channel>,
        id: LinkId,
        probes: &[Probe],
    ) -> Result<bool, TensorError> {
        let read = probes.iter().map(|probe| probe.peers.unwrap_or(0)).collect();
        let request = ConfirmRequest { link: id.to_vec().into(), read };
        let reply = match client.confirm(request).await {
            Ok(reply) => reply.into_inner(),
            Err(status) if status.code() == Code::Aborted => return Ok(false),
            Err(status) => return Err(self.refused(&status)),
        };
        if is_seen(probes, &reply.read) {
            Ok(true)
        } else {
            Err(self.no_rdma("it does not see this process' memory"))
        }
    }

    fn refused(&self, status: &tonic::Status) -> TensorError {
        refused(&self.endpoint, status)
    }

    fn no_rdma(&self, reason: impl std::fmt::Display) -> TensorError {
        TensorError::no_rdma(&self.endpoint, reason)
    }
}

fn request(prepared: &Prepared, provider: Provider, shared: &DeviceState) -> OpenRequest {
    OpenRequest {
        version: shared.settings.versions.oldest,
        newest_version: shared.settings.versions.newest,
        provider: provider.name().into(),
        queue_pairs: queue_pairs(prepared),
        words: Some(words(prepared)),
        endpoint: shared.endpoint(),
        places_in_order: prepared.places_in_order(),
        immediate: prepared.immediate(),
        group: lock(&shared.group).name(),
    }
}

/// Ends the link when its call ends, and ends the call when the link has ended. A runtime that shuts down
/// drops this future. That ends the link too, because nothing would poll for the link any more.
async fn watch(link: Weak<Link>, mut answers: tonic::Streaming<OpenReply>) {
    let ended = match link.upgrade() {
        Some(link) => link.ended(),
        None => return,
    };
    let end = EndLinkOnDrop(link);
    tokio::select! {
        answer = answers.message() => if let Some(link) = end.0.upgrade() {
            let reason = answer.err().map(|status| format!("the connection to it ended: {}", status.message()));
            link.peer_left(reason.as_deref().unwrap_or("it closed the link"));
        },
        () = ended => {}
    }
}

/// Ends the link when dropped, unless the link has ended.
struct EndLinkOnDrop(Weak<Link>);

impl Drop for EndLinkOnDrop {
    fn drop(&mut self) {
        if let Some(link) = self.0.upgrade() {
            link.fail(TensorError::other("the runtime that polls for the link has shut down"));
        }
    }
}
