// Command roundtrip produces and consumes with franz-go, an independent client in Go, over a listener
// with TLS or SASL: one transaction that commits, one that aborts, then a group that reads committed
// records. It prints how many it has read. With -share it is a member of a share group instead (share.go);
// with -lines it produces each line of its input, and prints "acked LINE" and "read LINE" until the input
// ends.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

var (
	seeds     = flag.String("seeds", "", "host:port, separated by commas")
	ca        = flag.String("ca", "", "file of the authority: TLS")
	cert      = flag.String("cert", "", "file of the client's certificate and key")
	mechanism = flag.String("mechanism", "", "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER")
	user      = flag.String("user", "", "")
	password  = flag.String("password", "", "or the token of OAUTHBEARER")
	tokenFile = flag.String("token-file", "", "read for each authentication by OAUTHBEARER")
	topic     = flag.String("topic", "", "is created if it does not exist")
	group     = flag.String("share", "", "a share group, which consumes instead")
	count     = flag.Int("count", 100, "records of each transaction")
	seconds   = flag.Int("seconds", 30, "time limit")
	lines     = flag.Bool("lines", false, "produce the lines of the input, and print what is acknowledged and read")
)

func options() ([]kgo.Opt, error) {
	all := []kgo.Opt{kgo.SeedBrokers(strings.Split(*seeds, ",")...)}
	if *ca != "" {
		pem, err := os.ReadFile(*ca)
		if err != nil {
			return nil, err
		}
		config := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, errors.New("no certificate in " + *ca)
		}
		if *cert != "" {
			pair, err := tls.LoadX509KeyPair(*cert, *cert)
			if err != nil {
				return nil, err
			}
			config.Certificates = []tls.Certificate{pair}
		}
		all = append(all, kgo.DialTLSConfig(config))
	}
	switch *mechanism {
	case "":
	case "PLAIN":
		all = append(all, kgo.SASL(plain.Auth{User: *user, Pass: *password}.AsMechanism()))
	case "SCRAM-SHA-256":
		all = append(all, kgo.SASL(scram.Auth{User: *user, Pass: *password}.AsSha256Mechanism()))
	case "SCRAM-SHA-512":
		all = append(all, kgo.SASL(scram.Auth{User: *user, Pass: *password}.AsSha512Mechanism()))
	case "OAUTHBEARER":
		all = append(all, kgo.SASL(oauth.Oauth(func(context.Context) (oauth.Auth, error) {
			if *tokenFile == "" {
				return oauth.Auth{Token: *password}, nil
			}
			token, err := os.ReadFile(*tokenFile)
			return oauth.Auth{Token: strings.TrimSpace(string(token))}, err
		})))
	default:
		return nil, errors.New("unknown mechanism " + *mechanism)
	}
	return all, nil
}

func create(ctx context.Context, common []kgo.Opt) error {
	client, err := kgo.NewClient(common...)
	if err != nil {
		return err
	}
	defer client.Close()
	made, err := kadm.NewClient(client).CreateTopic(ctx, 3, -1, nil, *topic)
	if err == nil {
		err = made.Err
	}
	if err != nil && strings.Contains(err.Error(), "TOPIC_ALREADY_EXISTS") {
		return nil
	}
	return err
}

func produce(ctx context.Context, common []kgo.Opt) error {
	client, err := kgo.NewClient(append(common, kgo.TransactionalID(*topic+"-id"), kgo.DefaultProduceTopic(*topic))...)
	if err != nil {
		return err
	}
	defer client.Close()
	for _, end := range []kgo.TransactionEndTry{kgo.TryAbort, kgo.TryCommit} {
		if err := client.BeginTransaction(); err != nil {
			return err
		}
		for i := range *count {
			value := fmt.Sprintf("%v %d", bool(end), i)
			client.Produce(ctx, kgo.StringRecord(value), func(_ *kgo.Record, failed error) {
				if failed != nil && err == nil {
					err = failed
				}
			})
		}
		if flushed := client.Flush(ctx); flushed != nil || err != nil {
			return errors.Join(flushed, err)
		}
		if err := client.EndTransaction(ctx, end); err != nil {
			return err
		}
	}
	return nil
}

func consume(ctx context.Context, common []kgo.Opt) (int, error) {
	client, err := kgo.NewClient(append(common, kgo.ConsumeTopics(*topic), kgo.ConsumerGroup(*topic+"-group"),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	if err != nil {
		return 0, err
	}
	defer client.Close()
	read := 0
	for read < *count {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err0(); err != nil {
			return read, err
		}
		for _, failed := range fetches.Errors() {
			return read, failed.Err
		}
		fetches.EachRecord(func(record *kgo.Record) {
			if strings.HasPrefix(string(record.Value), "true ") {
				read++
			}
		})
	}
	return read, client.CommitUncommittedOffsets(ctx)
}

// What failed is printed, and not acknowledged: the caller waits for it in vain.
func relay(ctx context.Context, common []kgo.Opt) error {
	producer, err := kgo.NewClient(append(common[:len(common):len(common)], kgo.DefaultProduceTopic(*topic))...)
	if err != nil {
		return err
	}
	defer producer.Close()
	consumer, err := kgo.NewClient(append(common[:len(common):len(common)], kgo.ConsumeTopics(*topic),
		kgo.ConsumerGroup(*topic+"-group"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	if err != nil {
		return err
	}
	defer consumer.Close()
	ended, end := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ended.Err() == nil {
			fetches := consumer.PollFetches(ended)
			for _, failed := range fetches.Errors() {
				fmt.Fprintln(os.Stderr, failed.Err)
			}
			fetches.EachRecord(func(record *kgo.Record) { fmt.Printf("read %s\n", record.Value) })
		}
	}()
	for input := bufio.NewScanner(os.Stdin); input.Scan(); {
		line := input.Text()
		producer.Produce(ctx, kgo.StringRecord(line), func(_ *kgo.Record, failed error) {
			if failed != nil {
				fmt.Fprintln(os.Stderr, line, failed)
			} else {
				fmt.Printf("acked %s\n", line)
			}
		})
	}
	err = producer.Flush(ctx)
	end()
	<-done
	return err
}

func main() {
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(*seconds)*time.Second)
	defer cancel()
	common, err := options()
	if err == nil && *lines {
		if err = relay(ctx, common); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if err == nil {
		err = create(ctx, common)
	}
	if err == nil && *group != "" {
		var released int
		if released, err = share(ctx, common); err == nil {
			fmt.Println("settled", *count, "released", released)
			return
		}
	}
	if err == nil {
		err = produce(ctx, common)
	}
	read := 0
	if err == nil {
		read, err = consume(ctx, common)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("read", read)
}
