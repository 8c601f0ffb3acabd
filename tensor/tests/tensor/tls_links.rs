//! A link belongs to the connection that opened it. No client can use the link's identifier over another
//! connection.

use tonic::transport::{ClientTlsConfig, Endpoint};
use tonic::{Code, Status};
use tonic_rdma_proto::tensor_device::tensor_device_client::TensorDeviceClient;
use tonic_rdma_proto::tensor_device::{ConfirmRequest, Kind};
use tonic_rdma_tensor::{RdmaDevice, Rights};

use crate::raw_peer::RawPeer;
use support::{Authority, config};

type Client = TensorDeviceClient<tonic::transport::Channel>;

/// A device that listens with TLS and demands certificates, and the authority for them.
struct Served {
    device: RdmaDevice,
    authority: Authority,
}

impl Served {
    async fn new() -> Self {
        let authority = Authority::new("authority");
        let settings = RdmaDevice::builder().config(config()).plaintext_tensors(true);
        let settings = settings.server_tls(authority.mutual_server());
        Self { device: settings.bind("127.0.0.1:0").await.unwrap(), authority }
    }

    async fn client(&self, tls: ClientTlsConfig) -> Client {
        let endpoint = Endpoint::from_shared(self.device.endpoint()).unwrap().tls_config(tls).unwrap();
        TensorDeviceClient::new(endpoint.connect().await.unwrap())
    }
}

fn refused<T: std::fmt::Debug>(answer: Result<T, Status>) {
    let status = answer.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    assert!(status.message().contains("the connection that opened it"), "{status}");
}

#[tokio::test]
async fn no_other_connection_can_use_a_link() {
    let served = Served::new().await;
    let memory = served.device.allocate(4096).unwrap();
    let _exported = served.device.export("region", memory, Rights::READ_WRITE).unwrap();
    let tls = served.authority.client_named("worker-1");
    let mut link = RawPeer::over(served.client(tls.clone()).await).link().await;
    // A client with another certificate, and another connection of this client.
    let others = [served.authority.client_named("worker-2"), tls];
    for tls in others {
        let mut other = served.client(tls).await;
        refused(other.attach(link.attach_request("region", Kind::Region)).await);
        refused(other.confirm(ConfirmRequest { link: link.id.clone(), read: vec![0] }).await);
    }
    // The refused calls have not harmed the link.
    let place = link.attach("region").await;
    assert_eq!(place.length, 4096);
}

#[tokio::test]
async fn no_other_connection_can_confirm_a_link() {
    let served = Served::new().await;
    let link = RawPeer::over(served.client(served.authority.client_named("worker-1")).await).open().await;
    let mut link = link.unwrap();
    let mut other = served.client(served.authority.client_named("worker-2")).await;
    refused(other.confirm(ConfirmRequest { link: link.id.clone(), read: vec![0] }).await);
    let status = link.peer.client.attach(link.attach_request("region", Kind::Region)).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    // A wrong confirmation from the right connection ends the link.
    assert_eq!(link.confirm(vec![0]).await.unwrap_err().code(), Code::FailedPrecondition);
    link.ended("the link goes on").await;
}

/// Checks the ownership without TLS.
#[tokio::test]
async fn a_plaintext_link_belongs_to_its_connection() {
    let device = RdmaDevice::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
    let link = RawPeer::new(&device.endpoint()).await.link().await;
    let mut other = crate::raw_peer::client(&device.endpoint()).await;
    refused(other.attach(link.attach_request("region", Kind::Region)).await);
    refused(other.confirm(ConfirmRequest { link: link.id.clone(), read: vec![0] }).await);
}
