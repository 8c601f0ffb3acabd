//! A peer that makes every call and posts every work request by hand, so that it can break the protocol.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};
use tonic_rdma_proto::tensor_device::tensor_device_client::TensorDeviceClient;
use tonic_rdma_proto::tensor_device::{
    AttachRequest, ConfirmRequest, DescribeReply, DescribeRequest, Kind, MemoryRange, OpenReply, OpenRequest,
    QueuePair as OfferedPair,
};
use tonic_rdma_verbs::{
    Access, CompletionQueue, Context, HostMemory, MemoryRegion, Operation, PathSettings, Payload,
    ProtectionDomain, QueuePair, QueuePairAddress, QueuePairCapacity, QueuePairState, RemoteSegment,
    SendRequest, soft,
};

/// Bytes of a page of words.
const WORDS: usize = 1 << 18;

/// Connects to a device as any stock client can.
pub(crate) async fn client(endpoint: &str) -> TensorDeviceClient<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{endpoint}")).unwrap();
    TensorDeviceClient::new(endpoint.connect().await.unwrap()).max_encoding_message_size(64 << 20)
}

/// Returns the description that a device gives of itself.
pub(crate) async fn describe(endpoint: &str) -> DescribeReply {
    client(endpoint).await.describe(DescribeRequest {}).await.unwrap().into_inner()
}

/// A queue pair and its words, not connected yet.
pub(crate) struct RawPeer {
    pub(crate) client: TensorDeviceClient<Channel>,
    pair: Arc<dyn QueuePair>,
    queue: Arc<dyn CompletionQueue>,
    words: Arc<dyn MemoryRegion>,
    _domain: Arc<dyn ProtectionDomain>,
    context: Arc<dyn Context>,
}

/// A link that a raw peer has opened.
pub(crate) struct RawLink {
    pub(crate) peer: RawPeer,
    pub(crate) id: Bytes,
    pub(crate) words: MemoryRange,
    /// The call that keeps the link open.
    answers: Streaming<OpenReply>,
}

impl RawPeer {
    pub(crate) async fn new(endpoint: &str) -> Self {
        Self::over(client(endpoint).await)
    }

    /// Creates a peer that makes its calls through `client`.
    pub(crate) fn over(client: TensorDeviceClient<Channel>) -> Self {
        let context = soft::open().unwrap();
        let domain = context.alloc_protection_domain().unwrap();
        let queue = context.create_completion_queue(256).unwrap();
        let capacity = QueuePairCapacity {
            send_requests: 64,
            receive_requests: 16,
            send_segments: 1,
            receive_segments: 1,
            inline: 2048,
        };
        let pair = domain.create_queue_pair(&queue, &queue, &capacity).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        pair.to_init(access).unwrap();
        let memory = Arc::new(HostMemory::shared(WORDS, 4096).unwrap());
        let words = domain.register(memory, access).unwrap();
        Self { client, pair, queue, words, _domain: domain, context }
    }

    /// Returns a correct request to open a link.
    pub(crate) fn request(&self) -> OpenRequest {
        let address = self.pair.local_address().as_bytes().to_vec().into();
        OpenRequest {
            version: 3,
            provider: "soft".into(),
            queue_pairs: vec![OfferedPair { address, receives: 16 }],
            words: Some(MemoryRange {
                address: self.words.memory().address(),
                rkey: self.words.rkey().0,
                length: WORDS as u64,
            }),
            endpoint: "a raw peer".into(),
            places_in_order: true,
            immediate: self.context.attributes().immediate,
            group: Bytes::new(),
            newest_version: 4,
        }
    }

    /// Opens a link without a confirmation.
    pub(crate) async fn open(mut self) -> Result<RawLink, Status> {
        let request = self.request();
        let mut answers = self.client.open(request).await?.into_inner();
        let reply = answers.message().await?.unwrap();
        let path = PathSettings::default();
        let address = QueuePairAddress::new(reply.queue_pairs[0].address.to_vec()).unwrap();
        self.pair.to_rtr(&address, &path).unwrap();
        self.pair.to_rts(&path).unwrap();
        Ok(RawLink { peer: self, id: reply.link, words: reply.words.unwrap(), answers })
    }

    /// Opens a link and confirms it.
    pub(crate) async fn link(self) -> RawLink {
        self.try_link().await.unwrap()
    }

    /// Opens a link and confirms it, if the device does not refuse that.
    pub(crate) async fn try_link(self) -> Result<RawLink, Status> {
        let mut link = self.open().await?;
        let read = link.peer.pair.local().unwrap().probe().peers.unwrap_or(0);
        link.confirm(vec![read]).await?;
        Ok(link)
    }
}

impl RawLink {
    pub(crate) async fn confirm(&mut self, read: Vec<u64>) -> Result<(), Status> {
        let request = ConfirmRequest { link: self.id.clone(), read };
        self.peer.client.confirm(request).await.map(|_| ())
    }

    /// Returns a correct request for the memory of a region.
    pub(crate) fn attach_request(&self, name: &str, kind: Kind) -> AttachRequest {
        AttachRequest {
            link: self.id.clone(),
            name: name.into(),
            kind: kind.into(),
            metadata: Bytes::new(),
            words: 0,
            queue_pair: 0,
        }
    }

    /// Attaches the region `name` and returns its place.
    pub(crate) async fn attach(&mut self, name: &str) -> MemoryRange {
        let request = self.attach_request(name, Kind::Region);
        self.peer.client.attach(request).await.unwrap().into_inner().memory.unwrap()
    }

    pub(crate) fn write(&self, bytes: &[u8], remote: RemoteSegment, immediate: Option<u32>) {
        let slices = [IoSlice::new(bytes)];
        self.post(Operation::Write { data: Payload::Inline(&slices), remote, immediate });
    }

    pub(crate) fn send(&self, bytes: &[u8]) {
        self.post(Operation::Send { data: Payload::Inline(&[IoSlice::new(bytes)]), immediate: None });
    }

    /// Posts a request. Ignores the error of a queue pair that has ended or is full.
    fn post(&self, operation: Operation<'_>) {
        let mut completions = [tonic_rdma_verbs::WorkCompletion::EMPTY; 64];
        while self.peer.queue.poll(&mut completions) > 0 {}
        let _ = self.peer.pair.post_send(&[SendRequest { wr_id: 1, operation, signaled: true }]);
    }

    /// Waits until the peer has ended the link, or fails.
    pub(crate) async fn ended(&mut self, what: &str) {
        let end = tokio::time::timeout(Duration::from_secs(60), self.answers.message()).await;
        assert!(!matches!(end.expect(what), Ok(Some(_))), "a second answer");
    }

    /// Returns whether the queue pair has failed, as far as this peer has noticed.
    pub(crate) fn has_ended(&self) -> bool {
        self.peer.pair.state() == QueuePairState::Error
    }
}
