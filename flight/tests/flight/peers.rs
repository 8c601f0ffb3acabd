//! Stock peers: arrow-flight's own client and server, over TCP.

use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::flight_service_server::FlightServiceServer;
use arrow_flight::{FlightClient as StockClient, FlightDescriptor, Ticket};
use support::Runtime;
use tokio_stream::StreamExt as _;
use tonic::transport::{Channel, Endpoint, Server, server::TcpIncoming};
use tonic_rdma::{RdmaChannel, Verdict};
use tonic_rdma_flight::FlightClient;

use crate::batches::{of_all_kinds, of_numbers};
use crate::calls::collect;
use crate::service::{Store, encoded, serve};

const LIMIT: usize = 64 << 20;

#[test]
fn a_stock_client_uses_our_server() {
    Runtime::MultiThread.run(async {
        let store = Store::new();
        let address = serve(&store, LIMIT).await;
        let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
        let stock = FlightServiceClient::new(channel).max_decoding_message_size(LIMIT);
        let mut client = StockClient::new_from_inner(stock);
        for batches in [vec![of_all_kinds(500, 1), of_all_kinds(9, 2)], vec![of_numbers(8 << 20, 3)]] {
            store.insert("here", &batches);
            let mut got = client.do_get(Ticket::new("here")).await.unwrap();
            for batch in &batches {
                assert_eq!(&got.next().await.unwrap().unwrap(), batch);
            }
            assert!(got.next().await.is_none());
            let mut replies = client.do_put(encoded("there", batches.clone())).await.unwrap();
            assert_eq!(replies.next().await.unwrap().unwrap().app_metadata, "stored");
            assert_eq!(store.stored("there").unwrap().batches, batches);
        }
        // Stock encoding, which cuts large batches, and writes out dictionaries.
        let batch = of_numbers(8 << 20, 4);
        let descriptor = FlightDescriptor::new_path(vec!["cut".to_owned()]);
        let encoder = FlightDataEncoderBuilder::new().with_flight_descriptor(Some(descriptor));
        let mut replies =
            client.do_put(encoder.build(tokio_stream::iter([Ok(batch.clone())]))).await.unwrap();
        replies.next().await.unwrap().unwrap();
        let stored = store.stored("cut").unwrap();
        assert!(stored.batches.len() > 1);
        let rows: usize = stored.batches.iter().map(|batch| batch.num_rows()).sum();
        assert_eq!(rows, batch.num_rows());
        let mut at = 0;
        for part in &stored.batches {
            assert_eq!(part, &batch.slice(at, part.num_rows()));
            at += part.num_rows();
        }
    });
}

#[test]
fn our_client_uses_a_stock_server() {
    Runtime::MultiThread.run(async {
        let store = Store::new();
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = incoming.local_addr().unwrap();
        let service = FlightServiceServer::new(store.clone()).max_decoding_message_size(LIMIT);
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));

        let endpoint = || Endpoint::from_shared(format!("http://{address}")).unwrap();
        let rdma = RdmaChannel::builder(endpoint()).config(support::config()).connect().await.unwrap();
        let plain: Channel = endpoint().connect().await.unwrap();
        let batches = vec![of_all_kinds(700, 1), of_all_kinds(10, 2)];
        store.insert("here", &batches);
        assert_eq!(rdma.last_connection().unwrap().verdict(), Verdict::Tcp);
        let mut over_rdma_channel = FlightClient::new(rdma);
        let mut over_plain_channel = FlightClient::new(plain);
        let (got, _) = collect(over_rdma_channel.do_get(Ticket::new("here")).await.unwrap()).await;
        assert_eq!(got, batches);
        let (got, placement) = collect(over_plain_channel.do_get(Ticket::new("here")).await.unwrap()).await;
        assert_eq!((got, placement.batches), (batches.clone(), 2));
        let mut replies = over_plain_channel.do_put(encoded("there", batches.clone())).await.unwrap();
        assert_eq!(replies.next().await.unwrap().unwrap().app_metadata, "stored");
        assert_eq!(store.stored("there").unwrap().batches, batches);
        let (back, _) =
            collect(over_plain_channel.do_exchange(encoded("x", batches.clone())).await.unwrap()).await;
        assert_eq!(back, batches);
    });
}
