//! The service of a peer, as the end that opened the link calls it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tonic::transport::Channel as Grpc;
use tonic_rdma_verbs::internal::with_causes;

use crate::control::proto::tensor_device_client::TensorDeviceClient;
use crate::control::proto::{AttachReply, AttachRequest, Kind};
use crate::error::ChannelError;
use crate::link::Link;
use crate::link::word_pair::{Arrivals, PairOwner, WordPair};

/// The gRPC connection that a link was made over.
#[derive(Clone)]
pub(crate) struct PeerService {
    pub(crate) endpoint: Arc<str>,
    pub(crate) client: TensorDeviceClient<Grpc>,
    pub(crate) answer_timeout: Duration,
}

impl PeerService {
    /// Attaches to the region or slot `name` of the peer. Takes a pair of words here, and learns the peer's pair from the
    /// answer.
    pub(crate) async fn attach(
        &self,
        link: &Arc<Link>,
        port: u32,
        name: &Arc<str>,
        kind: Kind,
        metadata: Vec<u8>,
    ) -> Result<(Arc<WordPair>, AttachReply), ChannelError> {
        let owner = no_owner();
        // The peer's pair is unknown until the answer, and until then nothing is reported to it.
        let ours = link.add_pair(|number| WordPair::new(number, u32::MAX, Arrivals::Count, owner))?;
        let request = AttachRequest {
            link: link.id.to_vec().into(),
            name: name.to_string(),
            kind: kind.into(),
            metadata: metadata.into(),
            words: ours.number,
            queue_pair: port,
        };
        let mut client = self.client.clone();
        let answer = tokio::time::timeout(self.answer_timeout, client.attach(request)).await;
        let reply = match answer {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(self.refused(link, &status)),
            Err(_) => Err(ChannelError::TimedOut { what: "the peer's answer", limit: self.answer_timeout }),
        };
        match reply {
            Ok(reply) => Ok((ours, reply)),
            Err(error) => {
                link.remove_pair(&ours);
                Err(error)
            }
        }
    }

    /// Returns the error for a status of the peer.
    fn refused(&self, link: &Link, status: &tonic::Status) -> ChannelError {
        if let Some(fault) = link.fault() {
            return fault.clone();
        }
        refused(&self.endpoint, status)
    }
}

/// Returns the owner of a pair that needs no report of the link's end.
pub(crate) fn no_owner() -> Weak<dyn PairOwner> {
    struct NoOwner;
    impl PairOwner for NoOwner {
        fn link_ended(&self, _: &ChannelError) {}
    }
    Weak::<NoOwner>::new()
}

/// Returns the error for a status of the peer at `endpoint`.
pub(crate) fn refused(endpoint: &Arc<str>, status: &tonic::Status) -> ChannelError {
    // If the connection could not be made or has ended, only the sources of the status say why.
    let message = with_causes(status.message(), status);
    ChannelError::Refused { endpoint: Arc::clone(endpoint), code: status.code(), message: message.into() }
}
