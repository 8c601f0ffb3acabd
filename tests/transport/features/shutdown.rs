//! Graceful shutdown: calls in flight finish, new calls are refused, and the port is free afterwards.

use tokio_stream::StreamExt as _;
use tonic::Code;
use tonic_rdma_proto::greeter::HelloRequest;

use support::{Over, Port, ScriptedGreeter, say, unchanged, until};

#[test]
fn calls_in_flight_finish_and_new_ones_are_refused() {
    let outcome = unchanged(shut_down);
    assert_eq!(outcome, ("held".into(), vec!["one".into(), "two".into()]));
}

async fn shut_down(over: Over) -> (String, Vec<String>) {
    let (port, greeter) = (Port::reserve(), ScriptedGreeter::new());
    let running = over.serve_on(&port, &greeter).await;
    let mut client = over.client(&running).await;
    let mut other = client.clone();
    let call = tokio::spawn(async move { say(&mut other, "hold").await });
    let (names, sent) = tokio::sync::mpsc::channel(1);
    let name = |name: &str| HelloRequest { name: name.into() };
    names.send(name("one")).await.unwrap();
    let sent = tokio_stream::wrappers::ReceiverStream::new(sent);
    let mut chat = client.chat(sent).await.unwrap().into_inner();
    let mut chatted = vec![chat.next().await.unwrap().unwrap().message];
    until(|| greeter.held() == 1).await;

    let server = running.shut_down();
    while over.connect(port.endpoint()).await.is_ok() {}
    // GOAWAY may still be on its way. After it the channel dials again, and fails.
    while say(&mut client, "hello").await.map_err(|status| status.code()) != Err(Code::Unavailable) {}
    assert!(!server.is_finished(), "the server did not wait for its calls");

    greeter.release(1);
    names.send(name("two")).await.unwrap();
    chatted.push(chat.next().await.unwrap().unwrap().message);
    drop(names);
    assert!(chat.next().await.is_none());
    let held = call.await.unwrap().unwrap();
    server.await.unwrap().unwrap();
    over.serve_on(&port, &greeter).await.end().await;
    (held, chatted)
}
