//! Tensor devices beside TLS: refused unless the settings accept plaintext.

use std::net::SocketAddr;

use tokio::task::AbortHandle;
use tonic::Code;
use tonic::transport::{Server, ServerTlsConfig};
use tonic_rdma::RdmaIncoming;
use tonic_rdma_tensor::{Channel, DeviceBuilder, RdmaDevice, Rights, TensorErrorKind};

use support::{Authority, config, within};

fn settings() -> DeviceBuilder {
    RdmaDevice::builder().config(config())
}

/// Creates a device whose service is part of a server with TLS.
async fn behind_tls(settings: DeviceBuilder, tls: ServerTlsConfig) -> (RdmaDevice, SocketAddr, AbortHandle) {
    let device = settings.build().unwrap();
    let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
    let address = incoming.local_addr();
    let server = Server::builder().tls_config(tls).unwrap();
    let server = { server }.add_service(device.service()).serve_with_incoming(incoming);
    (device, address, tokio::spawn(server).abort_handle())
}

fn client(settings: DeviceBuilder) -> RdmaDevice {
    settings.build().unwrap()
}

/// Writes into memory that the server exports, and checks the content there.
async fn write(server: &RdmaDevice, client: &RdmaDevice, channel: &Channel) {
    let exported = server.export("region", server.allocate(4096).unwrap(), Rights::READ_WRITE).unwrap();
    let remote = channel.region("region").await.unwrap();
    let mut local = client.allocate(4096).unwrap();
    local.iter_mut().zip(0_u32..).for_each(|(byte, index)| *byte = (index * 31 % 251) as u8);
    let local = channel.write(&remote).from(local, ..4096).await.unwrap();
    let mut seen = vec![0; 4096];
    exported.memory().copy_out(0, &mut seen).unwrap();
    assert!(seen[..] == local[..]);
}

#[tokio::test]
async fn the_client_refuses_by_default() {
    let authority = Authority::new("authority");
    let allowed = settings().plaintext_tensors(true);
    let (_server, address, task) = behind_tls(allowed, authority.server()).await;
    let client = client(settings().client_tls(authority.client()));
    for peer in [format!("https://{address}"), address.to_string()] {
        let error = within(client.channel(&peer, 0)).await.unwrap_err();
        assert_eq!(error.kind(), TensorErrorKind::NotPermitted, "{error}");
        assert!(error.to_string().contains("DeviceBuilder::plaintext_tensors(true)"), "{error}");
        assert!(error.to_string().contains("RDMA_PLAINTEXT_TENSORS=allow"), "{error}");
    }
    task.abort();
}

#[tokio::test]
async fn the_server_refuses_by_default() {
    let authority = Authority::new("authority");
    let (_server, address, task) = behind_tls(settings(), authority.server()).await;
    let client = client(settings().client_tls(authority.client()).plaintext_tensors(true));
    let error = within(client.channel(&format!("https://{address}"), 0)).await.unwrap_err();
    let message = error.reason();
    assert_eq!(error.code(), Some(Code::FailedPrecondition), "{message}");
    assert!(message.contains("came over TLS"), "{message}");
    assert!(
        message.contains("DeviceBuilder::plaintext_tensors(true) or RDMA_PLAINTEXT_TENSORS=allow"),
        "{message}"
    );
    task.abort();
}

#[tokio::test]
async fn tensors_move_beside_tls_where_both_ends_allow_it() {
    let authority = Authority::new("authority");
    let allowed = settings().plaintext_tensors(true);
    let (server, address, task) = behind_tls(allowed.clone(), authority.mutual_server()).await;
    let client = client(allowed.client_tls(authority.client_named("worker")));
    // A client with settings for TLS uses TLS without `https://`.
    let channel = within(client.channel(&address.to_string(), 0)).await.unwrap();
    write(&server, &client, &channel).await;
    task.abort();
}

#[tokio::test]
async fn the_variable_allows_plaintext_and_the_setting_overrides_it() {
    let variables = |name: &str| match name {
        "RDMA_PLAINTEXT_TENSORS" => Some("allow".into()),
        // The other variables, such as the device, come from the environment.
        name => std::env::var_os(name),
    };
    let config = tonic_rdma::Config::from_variables(variables).unwrap();
    let authority = Authority::new("authority");
    let settings = RdmaDevice::builder().config(config).client_tls(authority.client());
    let (server, address, task) = behind_tls(settings.clone(), authority.server()).await;
    let allowed = client(settings.clone());
    let channel = within(allowed.channel(&format!("https://{address}"), 0)).await.unwrap();
    write(&server, &allowed, &channel).await;
    let refused = client(settings.plaintext_tensors(false));
    let error = within(refused.channel(&format!("https://{address}"), 0)).await.unwrap_err();
    assert_eq!(error.kind(), TensorErrorKind::NotPermitted, "{error}");
    task.abort();
}

#[tokio::test]
async fn a_device_may_listen_with_tls_by_itself() {
    let authority = Authority::new("authority");
    let settings = settings().plaintext_tensors(true);
    let listening = settings.clone().server_tls(authority.mutual_server());
    let server = listening.bind("127.0.0.1:0").await.unwrap();
    assert!(server.endpoint().starts_with("https://127.0.0.1:"), "{}", server.endpoint());
    let worker = client(settings.clone().client_tls(authority.client_named("worker")));
    let channel = within(worker.channel(&server.endpoint(), 0)).await.unwrap();
    write(&server, &worker, &channel).await;
    let unreachable = client(settings.clone().client_tls(authority.client()));
    let error = within(unreachable.channel(&server.endpoint(), 0)).await.unwrap_err();
    assert!(error.to_string().contains("CertificateRequired"), "{error}");
    let stranger = Authority::new("another authority");
    let stranger = client(settings.clone().client_tls(stranger.client()));
    let error = within(stranger.channel(&server.endpoint(), 0)).await.unwrap_err();
    assert!(error.to_string().contains("invalid peer certificate"), "{error}");
    assert!(channel.is_open());
}

#[tokio::test]
async fn an_unreachable_peer_is_an_error_with_the_reason() {
    let authority = Authority::new("authority");
    let settings = settings().plaintext_tensors(true);
    let server = settings.clone().server_tls(authority.server()).bind("127.0.0.1:0").await.unwrap();
    let plain = client(settings.clone());
    let error = within(plain.channel(&server.endpoint(), 0)).await.unwrap_err();
    assert!(error.to_string().contains("DeviceBuilder::client_tls"), "{error}");
    let secure = client(settings.clone().client_tls(authority.client()));
    for bad in ["ftp://127.0.0.1:1", "://127.0.0.1:1", "https://", "unix:/tmp/socket"] {
        let error = within(secure.channel(bad, 0)).await.unwrap_err();
        assert!(error.to_string().contains(bad), "{error}");
    }
    // TLS to a port without TLS, and plaintext to a port with TLS.
    let without = settings.clone().bind("127.0.0.1:0").await.unwrap();
    assert!(within(secure.channel(&without.endpoint(), 0)).await.is_err());
    assert!(within(plain.channel(server.endpoint().trim_start_matches("https://"), 0)).await.is_err());
    // Plaintext by choice, from a client that also has certificates.
    let channel = within(secure.channel(&format!("http://{}", without.endpoint()), 0)).await.unwrap();
    write(&without, &secure, &channel).await;
    let garbage = tonic::transport::Identity::from_pem("none", "none");
    let unusable = settings.server_tls(ServerTlsConfig::new().identity(garbage));
    let error = unusable.bind("127.0.0.1:0").await.unwrap_err();
    assert!(error.to_string().contains("DeviceBuilder::server_tls"), "{error}");
}

/// The settings for TLS contain private keys.
#[test]
fn the_debug_output_of_settings_shows_no_keys() {
    let authority = Authority::new("authority");
    let settings = settings().server_tls(authority.server()).client_tls(authority.client_named("worker"));
    let shown = format!("{settings:?}");
    assert!(shown.contains("https") && shown.len() < 2000, "{shown}");
    assert_eq!(settings, settings.clone());
    assert_ne!(settings, settings.clone().client_tls(authority.client()));
}
