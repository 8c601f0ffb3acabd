//! Maps the hosts and ports of the pages to free ports of this machine. This machine has no host `ps0`, and another program may use port
//! 50051. The types here have the names of types of the library and of tonic. They listen on a free port, and store it for the
//! address on the page.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::LazyLock;

use tokio::sync::watch;
use tonic_rdma::Config;
use tonic_rdma_tensor::{Channel, TensorError};

/// The addresses on the pages with the addresses on this machine. One map is enough, because `running` runs one test at a time.
static LISTENING: LazyLock<watch::Sender<BTreeMap<String, SocketAddr>>> =
    LazyLock::new(watch::Sender::default);

/// Forgets all addresses.
pub(crate) fn forget() {
    LISTENING.send_replace(BTreeMap::new());
}

/// Maps the `address` on a page to `here`. Clients on the pages reach servers on 0.0.0.0 by the host `ps0`.
pub(crate) fn listens(address: &str, here: SocketAddr) {
    let address = address.replace("0.0.0.0", "ps0");
    LISTENING.send_modify(|all| {
        all.insert(address, here);
    });
}

/// Waits until a server listens for `address`.
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

    pub(crate) fn builder() -> RdmaIncomingBuilder {
        RdmaIncomingBuilder(tonic_rdma::RdmaIncoming::builder())
    }
}

/// Stands in for `tonic_rdma::RdmaIncomingBuilder`.
pub(crate) struct RdmaIncomingBuilder(tonic_rdma::RdmaIncomingBuilder);

impl RdmaIncomingBuilder {
    pub(crate) fn config(self, config: Config) -> Self {
        Self(self.0.config(config))
    }

    pub(crate) async fn bind(self, address: &str) -> io::Result<tonic_rdma::RdmaIncoming> {
        let incoming = self.0.bind("127.0.0.1:0").await?;
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

/// Stands in for `tonic_rdma_tensor::DeviceBuilder`.
pub(crate) struct DeviceBuilder(tonic_rdma_tensor::DeviceBuilder);

impl DeviceBuilder {
    pub(crate) async fn bind(self, endpoint: &str) -> Result<RdmaDevice, TensorError> {
        let device = self.0.bind("127.0.0.1:0").await?;
        listens(endpoint, device.local_addr().unwrap());
        Ok(RdmaDevice(device))
    }
}

impl RdmaDevice {
    pub(crate) fn builder() -> DeviceBuilder {
        DeviceBuilder(tonic_rdma_tensor::RdmaDevice::builder())
    }

    pub(crate) async fn channel(&self, remote: &str, pair: u32) -> Result<Channel, TensorError> {
        self.0.channel(&find(remote).to_string(), pair).await
    }
}

impl Deref for RdmaDevice {
    type Target = tonic_rdma_tensor::RdmaDevice;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}
