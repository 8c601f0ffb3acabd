//! Errors of services, of programs and of limits.

use std::sync::atomic::Ordering;

use arrow_flight::Ticket;
use arrow_flight::error::FlightError;
use support::Runtime;
use tokio_stream::StreamExt as _;
use tonic::Code;

use crate::batches::of_numbers;
use crate::service::{Store, connect, encoded, serve, start};

fn code(error: &FlightError) -> Code {
    let FlightError::Tonic(status) = error else { panic!("no status: {error}") };
    status.code()
}

#[test]
fn a_status_of_the_service_arrives_before_and_within_a_stream() {
    Runtime::MultiThread.run(async {
        let (store, mut client, _) = start().await;
        assert_eq!(code(&client.do_get(Ticket::new("none")).await.unwrap_err()), Code::NotFound);
        let batch = of_numbers(1 << 20, 1);
        store.insert("some", std::slice::from_ref(&batch));
        let mut got = client.do_get(Ticket::new("some+disk broken")).await.unwrap();
        assert_eq!(got.next().await.unwrap().unwrap(), batch);
        let error = got.next().await.unwrap().unwrap_err();
        assert_eq!(code(&error), Code::DataLoss);
        assert!(error.to_string().contains("disk broken"), "{error}");
        assert!(got.next().await.is_none());
    });
}

#[test]
fn an_error_of_the_program_cancels_its_put() {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let (store, mut client, _) = start().await;
            let (begun, ended) =
                (|| store.begun.load(Ordering::Relaxed), || store.ended.load(Ordering::Relaxed));
            let (send, receive) = tokio::sync::mpsc::channel(4);
            let feeds = async {
                for message in encoded("broken", vec![of_numbers(1 << 20, 1)]).collect::<Vec<_>>().await {
                    send.send(message).await.unwrap();
                }
                // The service waits for more.
                support::until(|| begun() == 1).await;
                send.send(Err(FlightError::protocol("no more"))).await.unwrap();
            };
            let failing = tokio_stream::wrappers::ReceiverStream::new(receive);
            let (put, ()) = tokio::join!(client.do_put(failing), feeds);
            let error = put.unwrap_err();
            assert!(error.to_string().contains("no more"), "{error}");
            support::until(|| ended() == 1).await;
            // This error may come before the service has begun.
            let another_schema = vec![of_numbers(100, 1), crate::batches::of_all_kinds(3, 1)];
            let error = client.do_put(encoded("broken", another_schema)).await.unwrap_err();
            assert!(error.to_string().contains("28 columns instead of 2"), "{error}");
            support::until(|| begun() == ended()).await;
            assert!(store.stored("broken").is_none());
        });
    }
}

#[test]
fn an_error_of_the_program_ends_its_exchange() {
    Runtime::MultiThread.run(async {
        let (_, mut client, _) = start().await;
        let batch = of_numbers(1 << 20, 1);
        let (send, receive) = tokio::sync::mpsc::channel(4);
        for message in encoded("x", vec![batch.clone()]).collect::<Vec<_>>().await {
            send.send(message).await.unwrap();
        }
        let messages = tokio_stream::wrappers::ReceiverStream::new(receive);
        let mut replies = client.do_exchange(messages).await.unwrap();
        assert_eq!(replies.next().await.unwrap().unwrap(), batch);
        send.send(Err(FlightError::protocol("no more"))).await.unwrap();
        let error = replies.next().await.unwrap().unwrap_err();
        assert!(error.to_string().contains("no more"), "{error}");
        assert!(replies.next().await.is_none());
        send.closed().await;
    });
}

#[test]
fn limits_hold_at_both_ends() {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let store = Store::new();
            let (client, _) = connect(serve(&store, 1 << 20).await).await;
            let mut client = client.max_message_size(2 << 20);
            let sizes = [900_000, 1_100_000, 1_900_000, 2_200_000];
            for (bytes, fits_server, fits_client) in
                sizes.map(|bytes| (bytes, bytes < (1 << 20), bytes < (2 << 20)))
            {
                let batch = of_numbers(bytes, 1);
                store.insert("here", std::slice::from_ref(&batch));
                let got = client.do_get(Ticket::new("here")).await.unwrap().next().await.unwrap();
                let put = match client.do_put(encoded("there", vec![batch])).await {
                    Ok(mut replies) => replies.next().await.unwrap().map(drop),
                    Err(error) => Err(error),
                };
                assert_eq!(got.is_ok(), fits_client, "{bytes} bytes: {:?}", got.err());
                assert_eq!(put.is_ok(), fits_server, "{bytes} bytes: {put:?}");
                for error in [got.err(), put.err()].into_iter().flatten() {
                    assert_eq!(code(&error), Code::OutOfRange, "{bytes} bytes: {error}");
                }
            }
        });
    }
}
