//! The pages' hosts and ports on this machine. `ps0:50051` is no host here, and port 50051 may be another program's, so these
//! names stand in for the library's and tonic's own: they listen on a free port and remember for which address that is.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::LazyLock;

use tokio::sync::watch;
use tonic_rdma::Config;
use tonic_rdma_tensor::{Channel, ChannelError};

/// Where the addresses of the pages are. The tests run one at a time, see `running`.
static LISTENING: LazyLock<watch::Sender<BTreeMap<String, SocketAddr>>> =
    LazyLock::new(watch::Sender::default);

/// Forgets all of them.
pub(crate) fn forget() {
    LISTENING.send_replace(BTreeMap::new());
}

/// Has `address`, as a page writes it, stand for this one. A server that listens on all addresses is the pages' host `ps0`.
pub(crate) fn listens(address: &str, here: SocketAddr) {
    let address = address.replace("0.0.0.0", "ps0");
    LISTENING.send_modify(|all| {
        all.insert(address, here);
    });
}

/// Waits until the server that the pages have at `address` listens.
pub(crate) async fn ready(address: &str) -> SocketAddr {
    let mut listening = LISTENING.subscribe();
    let all = listening.wait_for(|all| all.contains_key(address)).await.unwrap();
    all[address]
}

fn find(address: &str) -> SocketAddr {
    *LISTENING.borrow().get(address).unwrap_or_else(|| panic!("nothing listens for {address}"))
}

/// Stands in for `tonic_rdma::RdmaIncoming`.
pub(crate) struct RdmaIncoming;

impl RdmaIncoming {
    pub(crate) async fn bind(address: &str) -> io::Result<tonic_rdma::RdmaIncoming> {
        let incoming = tonic_rdma::RdmaIncoming::bind("127.0.0.1:0").await?;
        listens(address, incoming.local_addr());
        Ok(incoming)
    }

    pub(crate) async fn bind_with(address: &str, config: Config) -> io::Result<tonic_rdma::RdmaIncoming> {
        let incoming = tonic_rdma::RdmaIncoming::bind_with("127.0.0.1:0", config).await?;
        listens(address, incoming.local_addr());
        Ok(incoming)
    }
}

/// Stands in for `tonic::transport::Endpoint`.
pub(crate) struct Endpoint;

impl Endpoint {
    pub(crate) fn from_static(uri: &'static str) -> tonic::transport::Endpoint {
        let here = find(uri.strip_prefix("http://").unwrap());
        tonic::transport::Endpoint::from_shared(format!("http://{here}")).unwrap()
    }
}

/// Stands in for `tonic_rdma_tensor::RdmaDevice`.
pub(crate) struct RdmaDevice(tonic_rdma_tensor::RdmaDevice);

impl RdmaDevice {
    pub(crate) async fn new(queues: u32, pairs: u32, endpoint: &str) -> Result<Self, ChannelError> {
        let device = tonic_rdma_tensor::RdmaDevice::new(queues, pairs, "127.0.0.1:0").await?;
        listens(endpoint, device.local_addr().unwrap());
        Ok(Self(device))
    }

    pub(crate) async fn channel(&self, remote: &str, pair: u32) -> Result<Channel, ChannelError> {
        self.0.channel(&find(remote).to_string(), pair).await
    }
}

impl Deref for RdmaDevice {
    type Target = tonic_rdma_tensor::RdmaDevice;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}
