"""The shell of gossip: one UDP socket and short TCP exchanges on the controller listener's address, a timer, and the file that counts lives.

    gossip = Gossip(core, datagram_socket, exchange)       # exchange: an authenticated connection to host:port, see Exchange
    await gossip.start()                                   # joins by the seeds, in the background
    gossip.event(ControllerKnown(node_id, epoch))          # or LoadMeasured, UnreachableHint, SeedsChanged, Forget, ProfileChanged
    gossip.on_change = callable(MemberChanged | ControllerSeen | NodeIdTwice)
    gossip.core.view(node_id), gossip.core.views(), gossip.core.controller
    await gossip.serve(reader, writer)                     # a connection that another host's gossip made, after the handshake
    await gossip.stop()                                    # says goodbye first
"""
