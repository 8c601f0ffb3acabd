//! A gRPC-Web client over HTTP/1, on the port of the other clients.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::transport::Server;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;
use tonic_web::GrpcWebLayer;

use support::{Over, ScriptedGreeter, say, unchanged};

#[test]
fn a_browser_calls_beside_the_others() {
    let (status, called) = unchanged(browse);
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert_eq!(called, "hello");
}

async fn browse(over: Over) -> (String, String) {
    let router = Server::builder()
        .accept_http1(true)
        .layer(GrpcWebLayer::new())
        .add_service(GreeterServer::new(ScriptedGreeter::new()));
    let running = over.serve_at("127.0.0.1:0", router).await;

    // gRPC's prefix, and HelloRequest { name: "web" }.
    let message = [0, 0, 0, 0, 5, 0x0a, 3, b'w', b'e', b'b'];
    let head = format!(
        "POST /tonic_rdma.greeter.v1.Greeter/SayHello HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\
         Content-Type: application/grpc-web+proto\r\nContent-Length: {}\r\n\r\n",
        running.address,
        message.len()
    );
    let mut browser = TcpStream::connect(running.address).await.unwrap();
    browser.write_all(&[head.as_bytes(), &message].concat()).await.unwrap();
    let mut response = Vec::new();
    browser.read_to_end(&mut response).await.unwrap();
    let text = String::from_utf8_lossy(&response);
    assert!(response.windows(message.len()).any(|part| part == message), "{text}");
    assert!(text.contains("grpc-status:0"), "{text}");

    let mut client = over.client(&running).await;
    (text.lines().next().unwrap().into(), say(&mut client, "hello").await.unwrap())
}
